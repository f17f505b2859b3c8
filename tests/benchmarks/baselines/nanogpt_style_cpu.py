"""The nanoGPT-style loop on the CPU, where it is compared with other engines and keeps other settings."""

import runpy
from pathlib import Path

ENGINE, BESIDE, KEEPS = "cpu", {"cpu", "ggml"}, ["dtype", "threads"]
BASELINES = runpy.run_path(str(Path(__file__).with_name("nanogpt_style.py")))["BASELINES"]
