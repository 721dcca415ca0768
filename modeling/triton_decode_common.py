"""What the kernels for few new tokens share: up to how many they take, and when they are worth it."""

# Queries per row that the decode kernels take; more go to the prefill kernels.
MOST_DECODE_QUERIES = 16
