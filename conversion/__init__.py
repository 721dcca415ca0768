"""Conversion of dense checkpoints into HySparse checkpoints."""
