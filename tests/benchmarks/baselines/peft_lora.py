"""LoRA on a llama as PEFT does it on a GPU: LlamaForCausalLM of transformers, get_peft_model, torch.optim.AdamW."""

import runpy
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F

from toyexp import LoraAdapter, Unavailable

ENGINE, BESIDE, KEEPS = "cuda", {"cuda", "ggml_cuda"}, ["dtype", "tf32"]
Loop = runpy.run_path(str(Path(__file__).with_name("_loop.py")))["Loop"]  # these files belong to no package

# PEFT's names of the target modules, and those of GGUF.
TARGETS = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}


class PEFT(Loop):
    """Steps of PEFT's loop from the plan's initial values."""

    name = "PEFT"

    def __init__(self, plan, adamw, engine):
        model = plan.model
        pairs = [adapter for adapter in plan.adapters if isinstance(adapter, LoraAdapter)]
        beside = {adapter.target.split(".")[-2] for adapter in pairs}
        plain = model.name == "llama" and not (model.head_dim or model.biases() or model.rope_factors)
        if not plain or model.rope_scale != 1:
            raise Unavailable("only written for a plain model=llama")
        if not pairs or len(pairs) != len(beside) * model.n_layers or not beside <= TARGETS.keys():
            raise Unavailable("only written for recipe=lora whose targets are matrices of every block")
        if any(pair.dropout for pair in pairs):
            raise Unavailable("only written for recipe.dropout=0")
        try:
            import peft
            import transformers
        except ImportError as error:
            raise Unavailable(f"{error}: pip install peft") from None
        super().__init__(plan, engine)
        rope = {"rope_type": "default", "rope_theta": model.rope_base}
        base = transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=model.vocab, hidden_size=model.d_model, intermediate_size=model.d_ff,
            num_hidden_layers=model.n_layers, num_attention_heads=model.n_heads, num_key_value_heads=model.n_kv_heads,
            max_position_embeddings=model.context, rms_norm_eps=model.norm_eps, rope_parameters=rope,
            tie_word_embeddings=model.tied, use_cache=False,
        ))  # fmt: skip
        rank = plan.tensor(f"{pairs[0].target}.lora_a").shape[0]
        names = [TARGETS[name].split(".")[-1] for name in beside]
        settings = peft.LoraConfig(r=rank, lora_alpha=pairs[0].scale * rank, target_modules=names)
        with warnings.catch_warnings():  # warnings about the versions of the libraries
            warnings.simplefilter("ignore")
            module = peft.get_peft_model(base, settings)
        self.load(module, plan)
        module.to(self.device)
        trained = [w for w in module.parameters() if w.requires_grad]
        self.train(module, adamw, [{"params": trained, "weight_decay": adamw.weight_decay}])
        self.note = f"peft {peft.__version__}, transformers {transformers.__version__}, {self.note}"

    def load(self, module, plan):
        """Load the plan's values; transformers' rope pairs the halves of a head's features, GGUF's pairs neighbours."""
        model = plan.model
        places = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
        if not model.tied:
            places["output.weight"] = "lm_head.weight"
        for i in range(model.n_layers):
            places |= {f"blk.{i}.{ours}.weight": f"model.layers.{i}.{name}.weight" for ours, name in NORMS.items()}
            places |= {f"blk.{i}.{ours}.weight": f"model.layers.{i}.{name}.weight" for ours, name in TARGETS.items()}
        weights = dict(module.named_parameters())
        with torch.no_grad():
            for tensor in plan.tensors:
                ours, _, pair = tensor.name.partition(".weight.lora_")
                values = torch.from_numpy(plan.initial_values(tensor))
                name = "base_model.model." + places[f"{ours}.weight" if pair else tensor.name]
                if pair:
                    name = name.replace(".weight", f".lora_{pair.upper()}.default.weight")
                elif name not in weights:
                    name = name.replace(".weight", ".base_layer.weight")
                if ours.endswith(("attn_q", "attn_k", "attn_q.weight", "attn_k.weight")) and pair != "a":
                    heads = model.n_heads if "attn_q" in ours else model.n_kv_heads
                    values = values.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
                weights[name].copy_(values)

    def loss(self, tokens, targets):
        logits = self.module(input_ids=tokens).logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class CompiledPEFT(PEFT):
    """PEFT with torch.compile."""

    name, compiled = "PEFT compiled", True


BASELINES = (PEFT, CompiledPEFT)
