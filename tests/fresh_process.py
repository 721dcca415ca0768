"""Running code where neither our package nor the network can be reached; imported as `fresh_process`."""

import json
import os
import subprocess
import sys

import torch


# Prepended to every fresh process: neither the blocked packages nor the network can be reached.
ISOLATED = """
import importlib.abc, json, socket, sys
argument = json.loads(sys.argv[1])
class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in argument["blocked"]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
def refuse(*args, **kwargs):
    raise OSError("the network is blocked")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer
torch.set_num_threads(argument["threads"])
"""


def run_isolated(body, cache, blocked=("hysparse_hf", "triton"), **argument):
    """Run `body` in a fresh process and return what it prints last, as JSON."""
    argument |= {"threads": torch.get_num_threads(), "blocked": blocked}
    done = subprocess.run(
        [sys.executable, "-c", ISOLATED + body, json.dumps(argument)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "HF_MODULES_CACHE": str(cache), "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])
