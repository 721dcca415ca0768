"""What a planted fault is, and the names of the files that have some."""

from typing import NamedTuple


REFERENCE = "modeling/reference_hysparse.py"
SELECTION = "modeling/selection_hysparse.py"
ROWS = "modeling/rows_hysparse.py"
MODEL = "modeling/modeling_hysparse.py"
DECODER = "modeling/decoder_hysparse.py"
CONFIG = "modeling/configuration_hysparse.py"
CACHE = "modeling/cache_layers_hysparse.py"
FIXED_CACHE = "modeling/cache_fixed_hysparse.py"
CACHE_COLUMNS = "modeling/cache_columns_hysparse.py"
INPUTS = "modeling/inputs_hysparse.py"
WHOLE_CACHE = "modeling/cache_hysparse.py"
PROMPT_END = "modeling/prompt_end_hysparse.py"
MODEL2 = "modeling/modeling_hysparse2.py"
DECODER2 = "modeling/decoder_hysparse2.py"


class Mutant(NamedTuple):
    """Replace `old`, which occurs once in `file`, by `new`; `test` must fail."""

    file: str
    old: str
    new: str
    test: str
