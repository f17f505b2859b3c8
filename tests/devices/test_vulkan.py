"""engine=vulkan in float32 and in float16, on the device where there is one: a GPU, or one in software.

ggml opens a Vulkan device with float16 or without, once in a process: so these runs have processes of their own.
`GGML_VK_VISIBLE_DEVICES=0` lets ggml take a device in software, such as Mesa's llvmpipe.
"""

import json
import os
import subprocess
import sys

import pytest
from tiny import plan

from toyexp import Unavailable, UserError
from toyexp_ggml.engines import GGMLVulkan

TINY = ["data=text", "data.path=book.txt", "data.tokenizer=byte", "model.d_model=32", "model.context=16", "lr=1e-3"]

# Metal's profile (plain ops, scaled gradients) on a device whose products round to float16, like Metal's.
METAL = '''
from dataclasses import dataclass, replace

from toyexp import hookimpl
from toyexp_ggml.engines import GGMLVulkan
from toyexp_ggml.profiles import METAL


@dataclass
class MetalsGraph(GGMLVulkan):
    """Metal's graph on Vulkan."""

    name = "metals_graph"
    half: bool = True
    profile = replace(METAL, device="Vulkan")


@hookimpl
def register_engines(register):
    register(MetalsGraph)
'''


@pytest.fixture
def require_vulkan(tmp_path, monkeypatch):
    try:
        GGMLVulkan().check()
    except Unavailable as reason:
        pytest.skip(str(reason))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOYEXP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "book.txt").write_text("It was a bright cold day in April, and the clocks were striking. " * 200)
    (tmp_path / "metals_graph.py").write_text(METAL)
    return tmp_path


def run_process(*words):
    """Run a process; return its exit code and output."""
    child = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    return child.returncode, child.stdout, child.stderr


def run_parity(*words, settings=TINY):
    code, out, err = run_process("-m", "toyexp", "parity", *settings, *words, "--json")
    assert (code, err) == (0, "")
    (report,) = json.loads(out)["engines"]
    return report["rounds_to"], report["loss"]["largest"], max(t["gradient"] for t in report["tensors"])


@pytest.mark.device("vulkan")
@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_vulkan_computes_in_float32_by_default(require_vulkan, model):
    rounds_to, loss, gradient = run_parity(f"model={model}", "engine=cpu:threads=1,vulkan")
    assert rounds_to == "float32"
    assert loss < 1e-5 and gradient < 1e-5


@pytest.mark.device("vulkan")
def test_products_with_a_quantised_base_are_in_float32(require_vulkan):
    """By default ggml would round the other factor to 8 bits."""
    base = [*TINY[:3], "model.d_model=64", "engine=ggml", "steps=2", "callbacks.gguf_export.type=q8_0"]
    code, _, err = run_process("-m", "toyexp", *base, "hydra.run.dir=base")
    assert code == 0, err
    words = [*TINY[:3], "recipe=lora", "recipe.base=base/model.gguf", "recipe.targets=['*']", "steps=4"]
    _, loss, gradient = run_parity(*words, "engine=cpu:threads=1,vulkan", settings=())
    assert loss < 1e-5 and gradient < 1e-5


@pytest.mark.device("vulkan")
def test_products_cut_into_more_groups_agree_with_the_cpu(require_vulkan):
    """Checks 256 positions and 128 features, also with a quantised matrix."""
    large = [*TINY[:3], "model.d_model=128", "model.n_layers=1", "model.context=256", "lr=1e-3"]
    _, loss, gradient = run_parity("batch_size=2", "steps=1", "engine=cpu:threads=1,vulkan", settings=large)
    assert loss < 1e-5 and gradient < 1e-5
    code, _, err = run_process(
        "-m", "toyexp", *large, "engine=ggml", "steps=1", "callbacks.gguf_export.type=q8_0", "hydra.run.dir=base"
    )
    assert code == 0, err
    words = [*TINY[:3], "recipe=lora", "recipe.base=base/model.gguf", "recipe.targets=['*']", "steps=1"]
    _, loss, gradient = run_parity(*words, "engine=cpu:threads=1,vulkan", settings=())
    assert loss < 1e-5 and gradient < 1e-5


@pytest.mark.device("vulkan")
@pytest.mark.parametrize("engine", ["vulkan:half=true", "metals_graph"])
@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_float16_and_metals_graph_keep_the_tolerances_documented_for_metal(require_vulkan, model, engine):
    """Losses must be within 1e-3 and gradients within 5e-3 of torch's, but not closer than float16 can be."""
    rounds_to, loss, gradient = run_parity("plugins=[metals_graph]", f"model={model}", f"engine=cpu:threads=1,{engine}")
    assert rounds_to == "float16"
    assert loss < 1e-3
    assert 1e-5 < gradient < 5e-3


@pytest.mark.device("vulkan")
@pytest.mark.parametrize("engine", ["vulkan", "vulkan:half=true", "metals_graph"])
def test_doctor_finds_every_op_within_the_tolerance_of_its_precision(require_vulkan, engine):
    code, out, _ = run_process("-m", "toyexp", "doctor", "--numerics", "plugins=[metals_graph]", f"engine={engine}")
    assert code == 0, out
    assert out.splitlines()[0].endswith(f"products in {'float32' if engine == 'vulkan' else 'float16'}")


@pytest.mark.device("vulkan")
def test_doctor_names_the_device_and_reports_a_software_device(require_vulkan):
    _, out, _ = run_process("-m", "toyexp", "doctor")
    (line,) = (line for line in out.splitlines() if line.split()[:1] == ["vulkan"])
    assert "PASS  ggml on Vulkan: " in line and line.endswith("products in float32")
    assert ("software on the CPU" in line) == ("llvmpipe" in line)


@pytest.mark.device("vulkan")
def test_opening_the_device_restores_the_environment(require_vulkan):
    """Processes started later must not inherit the variables."""
    before = dict(os.environ)
    GGMLVulkan().realize(plan("llama")).close()
    assert dict(os.environ) == before


@pytest.mark.device("vulkan")
@pytest.mark.parametrize(
    ("first", "half", "message", "advice"),
    [
        (
            "GGMLVulkan().realize(p).close()",
            True,
            "engine.half=true: ggml opens a Vulkan device once per process",
            "use one value per command",
        ),
        (
            "rounds_products('Vulkan')",
            False,
            "engine.half=false: other code in this process has opened the Vulkan device with float16",
            "in a separate process",
        ),
    ],
)
def test_another_precision_in_the_same_process_is_rejected(require_vulkan, first, half, message, advice):
    """Either toyexp or other code opened it."""
    code = (
        "from toyexp.testing import op_plan\nfrom toyexp_ggml.engines import GGMLVulkan\n"
        f"from toyexp_ggml.probe import rounds_products\np = op_plan('matmul')\n{first}\n"
        f"GGMLVulkan(half={half}).realize(p)\n"
    )
    _, _, err = run_process("-c", code)
    assert message in err and advice in err


@pytest.mark.device("vulkan")
def test_half_is_rejected_if_the_environment_disables_float16(require_vulkan, monkeypatch):
    monkeypatch.setenv("GGML_VK_DISABLE_F16", "1")
    code, _, err = run_process("-m", "toyexp", "doctor", "--numerics", "engine=vulkan:half=true")
    assert code == 2
    assert err.startswith("toyexp: error: engine.half=true: GGML_VK_DISABLE_F16 is set in the environment")


# -- without a device -------------------------------------------------------------------------------------------------


@pytest.fixture
def found_devices(monkeypatch):
    """Return the devices that ggml reports, which a test can change, in a process that has not opened one."""
    devices = {}
    monkeypatch.setattr("toyexp_ggml.binding.devices", lambda: devices)
    monkeypatch.setattr("toyexp_ggml.binding.is_built_with", lambda name: True)
    monkeypatch.setattr(GGMLVulkan, "_opened_half", None)
    for name in ("GGML_VK_VISIBLE_DEVICES", "GGML_VK_DISABLE_F16"):
        monkeypatch.delenv(name, raising=False)
    return devices


def test_a_software_device_is_reported_as_such_and_a_gpu_is_not(found_devices):
    found_devices["Vulkan0"] = "llvmpipe (LLVM 15.0.6, 256 bits)"
    note = "ggml on Vulkan: llvmpipe (LLVM 15.0.6, 256 bits), software on the CPU, products in float32"
    assert GGMLVulkan().check() == note
    found_devices["Vulkan0"] = "NVIDIA H200"
    assert GGMLVulkan().check() == "ggml on Vulkan: NVIDIA H200, products in float32"


def test_without_a_device_the_error_says_how_to_use_a_software_device(found_devices, monkeypatch):
    with pytest.raises(Unavailable, match=r"no such device here; .* software device.* GGML_VK_VISIBLE_DEVICES=0"):
        GGMLVulkan().check()
    monkeypatch.setenv("GGML_VK_VISIBLE_DEVICES", "3")
    with pytest.raises(Unavailable, match="no such device here; GGML_VK_VISIBLE_DEVICES=3 must be numbers"):
        GGMLVulkan().check()


def test_a_process_uses_one_precision_except_on_emulated_devices(found_devices):
    found_devices["Vulkan0"] = "NVIDIA H200"
    assert GGMLVulkan(half=True).check().endswith("products in float16")
    with pytest.raises(UserError, match=r"^engine\.half=false: .* once per process, .* engine=vulkan:half=true"):
        GGMLVulkan().check()
    assert "emulated" in GGMLVulkan(emulate=True).check()
    assert GGMLVulkan(half=True).product_dtype() == "float16"
    assert GGMLVulkan(half=True, emulate=True).product_dtype() == GGMLVulkan().product_dtype() == "float32"


def test_float32_opens_the_device_without_float16_8_bit_products_and_matrix_cores(found_devices, monkeypatch):
    """Each is disabled by its own variable, and the environment is restored."""
    found_devices["Vulkan0"] = "NVIDIA H200"
    environment, before = {}, dict(os.environ)
    monkeypatch.setattr(GGMLVulkan, "_is_exact", False)
    monkeypatch.setattr("toyexp_ggml.probe.rounds_products", lambda device: environment.update(os.environ) or True)
    with pytest.raises(UserError, match="opened the Vulkan device with float16"):
        GGMLVulkan().realize(plan("llama"))
    disabled = {name.removeprefix("GGML_VK_DISABLE_") for name in environment.keys() - before.keys()}
    assert disabled == {"F16", "COOPMAT", "COOPMAT2", "INTEGER_DOT_PRODUCT"}
    assert dict(os.environ) == before
