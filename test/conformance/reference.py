"""Language models in float64, written from the formulas, with switches that put a known bug into them. make.py computes the right and the wrong values
of the cases with it; neither transformers nor train_llama is involved.

A model reads one row of packed documents. `bugs` is a set of names; each name occurs once, where the bug is."""

import json
import math

import numpy as np
import torch
from safetensors.torch import load_file

F = torch.nn.functional


def read_config(folder):
    """config.json with the rotation in one form: `rope`, and `local_rope` for the windowed layers of Gemma 3."""
    c = json.loads((folder / "config.json").read_text())
    if c["model_type"] == "gpt2":
        return c
    c["head_dim"] = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    c.setdefault("num_key_value_heads", c["num_attention_heads"])
    rope = c.get("rope_parameters") or {"rope_theta": c["rope_theta"], **(c.get("rope_scaling") or {})}
    local = rope.get("sliding_attention") or {"rope_theta": c.get("rope_local_base_freq", 0)}
    rope = rope.get("full_attention", rope)
    c["rope"], c["local_rope"] = ({"rope_type": r.get("type", "default"), **r} for r in (rope, local))
    return c


def layer_windows(c, bugs):
    """Of each layer its window, or 0."""
    L, window = c["num_hidden_layers"], c.get("sliding_window") or 0
    if "window_ignored" in bugs:
        return [0] * L
    if not c.get("use_sliding_window", True) and "unused_window" not in bugs:
        return [0] * L
    kinds = c.get("layer_types")
    if c["model_type"] == "gemma3_text" and not kinds:
        kinds = ["full_attention" if (i + 1) % c["sliding_window_pattern"] == 0 else "sliding_attention" for i in range(L)]
    if c["model_type"] == "qwen2" and not kinds:
        kinds = ["full_attention"] * c["max_window_layers"] + ["sliding_attention"] * (L - c["max_window_layers"])
    if "window_everywhere" in bugs or not kinds:
        kinds = ["sliding_attention"] * L
    if "window_in_other_layers" in bugs:
        kinds = ["full_attention" if kind == "sliding_attention" else "sliding_attention" for kind in kinds]
    return [window + ("window_off_by_one" in bugs) if kind == "sliding_attention" else 0 for kind in kinds]


def frequencies(c, rope, length, bugs):
    """Angles per position of the pairs of a head, and the factor of cosines and sines. length: of the document."""
    partial = 1 if "partial_rotation_ignored" in bugs else rope.get("partial_rotary_factor", 1)
    d, theta, kind, factor = int(c["head_dim"] * partial), rope["rope_theta"], rope["rope_type"], rope.get("factor", 1)
    if "default_theta" in bugs:
        theta = 10000.0
    inverse, attention = theta**(-torch.arange(0, d, 2, dtype=torch.float64) / d), 1.0
    if "scaling_ignored" in bugs:
        return inverse, attention
    if kind == "linear":
        inverse = inverse / factor
    elif kind == "llama3":
        longest, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
        smooth = ((longest * inverse / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        inverse = (1 - smooth) * inverse / factor + smooth * inverse
    elif kind == "yarn":
        edge = lambda turns: d * math.log(rope["original_max_position_embeddings"] / (turns * 2 * math.pi)) / (2 * math.log(theta))
        low, high = max(math.floor(edge(rope["beta_fast"])), 0), min(math.ceil(edge(rope["beta_slow"])), d - 1)
        ramp = ((torch.arange(d // 2, dtype=torch.float64) - low) / max(high - low, 0.001)).clamp(0, 1)
        inverse = inverse / factor * ramp + inverse * (1 - ramp)
        attention = 1.0 if "attention_factor_missing" in bugs else 0.1 * math.log(factor) + 1
    elif kind == "longrope":
        original = c["original_max_position_embeddings"]
        is_long = (length > original or "long_factors_always" in bugs) and "short_factors_always" not in bugs
        inverse = inverse / torch.tensor(rope["long_factor" if is_long else "short_factor"], dtype=torch.float64)
        if "attention_factor_missing" not in bugs:
            attention = math.sqrt(1 + math.log(c["max_position_embeddings"] / original) / math.log(original))
    return inverse, attention


def rotate(x, angles, attention, bugs):
    """x: (T, heads, D); angles: (T, d / 2) with d <= D."""
    half = angles.shape[1]
    cos, sin = attention * angles.cos()[:, None], attention * angles.sin()[:, None]
    if "interleaved_rotation" in bugs:
        a, b, rest = x[..., :2 * half:2], x[..., 1:2 * half:2], x[..., 2 * half:]
        return torch.cat([torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2), rest], -1)
    a, b, rest = x[..., :half], x[..., half:2 * half], x[..., 2 * half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


class Row:
    """Documents one after another: ids, positions, numbers of documents and their lengths, by token."""

    def __init__(self, documents, bugs):
        lengths = [len(ids) for ids in documents]
        self.begins = np.cumsum([0] + lengths)[:-1]
        self.ids = torch.tensor([i for ids in documents for i in ids])
        self.doc = torch.tensor(np.repeat(np.arange(len(lengths)), lengths))
        self.position = torch.arange(len(self.ids)) - torch.tensor(self.begins)[self.doc]
        self.length = torch.tensor(lengths)[self.doc]
        if "positions_run_on" in bugs:
            self.position = torch.arange(len(self.ids))
        if "positions_count_padding" in bugs:  # on the left, up to the longest document
            self.position = self.position + max(lengths) - self.length
        if "length_of_the_row" in bugs:
            self.length = torch.full_like(self.length, len(self.ids))

    def mask(self, window, bugs):
        i, j = torch.arange(len(self.ids))[:, None], torch.arange(len(self.ids))[None]
        seen = (j <= i) & ((i - j < window) if window else True)
        return seen if "attention_crosses" in bugs else seen & (self.doc[:, None] == self.doc[None])


class Model:
    def __init__(self, folder, bugs=frozenset(), adapter=None):
        self.c, self.bugs, self.scale, self.aux = read_config(folder), bugs, 0.0, []
        self.t = {name.removeprefix("transformer."): tensor.double() for file in sorted(folder.glob("*.safetensors")) if not file.name.startswith("golden")
                  for name, tensor in load_file(file).items() if not name.endswith((".attn.bias", ".attn.masked_bias"))}
        self.trained = list(self.t)
        if adapter:
            self.adapt(adapter)
        for name in self.trained:
            self.t[name].requires_grad_()

    def adapt(self, adapter):
        config = json.loads((adapter / "adapter_config.json").read_text())
        r, alpha = config["r"], config["lora_alpha"]
        self.scale = alpha / math.sqrt(r) if config["use_rslora"] and "rslora_ignored" not in self.bugs else alpha / r
        self.scale = 1.0 if "alpha_ignored" in self.bugs else self.scale
        own = {name.removeprefix("base_model.model.").removeprefix("transformer."): tensor.double()
               for name, tensor in load_file(adapter / "adapter_model.safetensors").items()}
        if "trained_head_tied_again" in self.bugs:
            own.pop("lm_head.weight")
        self.t.update(own)
        self.trained = list(own)

    def linear(self, name, x, fan_in=False):
        w, bias = self.t[name + ".weight"], self.t.get(name + ".bias")
        y = x @ (w if fan_in else w.T)
        if bias is not None and not ("attention_bias_dropped" in self.bugs and "self_attn" in name):
            y = y + bias
        if name + ".lora_A.weight" in self.t:
            a, b = self.t[name + ".lora_A.weight"], self.t[name + ".lora_B.weight"]
            update = (x @ a.T) @ b.T
            if "lora_factor_of_one_rank" in self.bugs:  # the other rank's outputs do not reach the gradient of the factor that both ranks have
                half = update.shape[-1] // 2
                update = torch.cat([update[..., :half], ((x @ a.detach().T) @ b.T)[..., half:]], -1)
            y = y + self.scale * update
        return y

    def norm(self, name, x):
        plus_one = self.c["model_type"].startswith(("gemma3", "qwen3_5")) and not name.endswith("linear_attn.norm")
        plus_one ^= ("norm_without_one" in self.bugs and plus_one) or ("one_in_the_gated_norm" in self.bugs and not plus_one)
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.c["rms_norm_eps"]) * (self.t[name + ".weight"] + plus_one)

    # ---- layers ----

    def attention(self, i, x, row, window):
        c, p, bugs, T = self.c, f"model.layers.{i}.self_attn.", self.bugs, len(x)
        H, KV, D = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        gate = None
        if p + "qkv_proj.weight" in self.t:
            q, k, v = self.linear(p + "qkv_proj", x).split([H * D, KV * D, KV * D], -1)
        else:
            q, k, v = (self.linear(p + name, x) for name in ("q_proj", "k_proj", "v_proj"))
        if c["model_type"].startswith("qwen3_5"):
            q, gate = q.chunk(2, -1) if "gates_behind_all_queries" in bugs else q.view(T, H, 2, D).unbind(2)
        wide = c["model_type"] == "olmo2" and "norm_of_each_head" not in bugs
        heads = lambda y, n: y.reshape(T, n, D)

        def normed(y, name, n):
            if p + name + ".weight" not in self.t:
                return heads(y, n)
            w, y = self.t[p + name + ".weight"], y.reshape(T, -1) if wide else heads(y, n)
            if "head_norm_of_one_rank" in bugs:  # the other rank's heads do not reach the gradient of the weight they share
                w = torch.cat([w.expand(n // 2, D), w.detach().expand(n - n // 2, D)])
            if c["model_type"] == "olmo2" and not wide:
                w = w.view(n, D)
            one = c["model_type"].startswith(("gemma3", "qwen3_5")) and "norm_without_one" not in bugs
            return heads(y * torch.rsqrt((y * y).mean(-1, keepdim=True) + c["rms_norm_eps"]) * (w + one), n)

        def rotated(y):
            unrotated = c.get("no_rope_layers") and not c["no_rope_layers"][i]
            if unrotated and "every_layer_rotated" not in bugs:
                return y
            local = c["model_type"] == "gemma3_text" and window and "one_rotation_for_all" not in bugs
            rope = dict(c["local_rope"] if local else c["rope"])
            if local and "local_rotation_scaled" in bugs:
                rope |= {k: v for k, v in c["rope"].items() if k in ("rope_type", "factor")}
            tables = {n: frequencies(c, rope, n, bugs) for n in set(row.length.tolist())}
            angles = torch.stack([tables[n][0] * t for n, t in zip(row.length.tolist(), row.position.tolist())])
            factors = torch.tensor([tables[n][1] for n in row.length.tolist()], dtype=torch.float64)
            return rotate(y, angles, factors[:, None, None], bugs)

        if "norm_behind_rotation" in bugs:
            q, k = normed(rotated(heads(q, H)), "q_norm", H), normed(rotated(heads(k, KV)), "k_norm", KV)
        else:
            q, k = rotated(normed(q, "q_norm", H)), rotated(normed(k, "k_norm", KV))
        v, group = heads(v, KV), H // KV
        k, v = ((y.repeat(1, group, 1) if "key_heads_tiled" in bugs else y.repeat_interleave(group, 1)) for y in (k, v))
        scale = D**-0.5
        if c["model_type"] == "gemma3_text" and "scale_of_head_dim" not in bugs:
            scale = c["query_pre_attn_scalar"]**-0.5
        if c["model_type"] == "granite" and "scale_of_head_dim" not in bugs:
            scale = c["attention_multiplier"]
        scores = torch.einsum("ihd,jhd->hij", q, k) * scale
        y = torch.einsum("hij,jhd->ihd", scores.masked_fill(~row.mask(window, bugs), -math.inf).softmax(-1), v).reshape(T, H * D)
        y = y if gate is None else y * gate.reshape(T, H * D).sigmoid()
        return self.linear(p + "o_proj", y)

    def delta(self, i, x, row):
        """The gated delta rule, token by token."""
        c, p, T, bugs = self.c, f"model.layers.{i}.linear_attn.", len(x), self.bugs
        Hk, Hv, Dk, Dv = (c[f"linear_{name}"] for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"))
        raw, w, taps = self.linear(p + "in_proj_qkv", x), self.t[p + "conv1d.weight"][:, 0], []
        for back in range(4):
            shifted = F.pad(raw, (0, 0, back, 0))[:T]
            taps.append(shifted * w[:, 3 - back] * (1.0 if "convolution_crosses" in bugs else (row.position >= back).double()[:, None]))
        q, k, v = F.silu(sum(taps)).split([Hk * Dk, Hk * Dk, Hv * Dv], -1)
        unit = lambda y: y * torch.rsqrt((y * y).sum(-1, keepdim=True) + 1e-6)
        many = lambda y: y.repeat(1, Hv // Hk, 1) if "delta_heads_tiled" in bugs else y.repeat_interleave(Hv // Hk, 1)
        q, k, v = many(unit(q.view(T, Hk, Dk)) * (1 if "delta_queries_unscaled" in bugs else Dk**-0.5)), many(unit(k.view(T, Hk, Dk))), v.view(T, Hv, Dv)
        beta, z = self.linear(p + "in_proj_b", x).sigmoid(), self.linear(p + "in_proj_z", x).view(T, Hv, Dv)
        decay = torch.exp(-self.t[p + "A_log"].exp() * F.softplus(self.linear(p + "in_proj_a", x) + self.t[p + "dt_bias"]))
        S, out = torch.zeros(Hv, Dk, Dv, dtype=torch.float64), []
        for t in range(T):
            if row.position[t] == 0 and "state_crosses" not in bugs:
                S = torch.zeros_like(S)
            S = decay[t][:, None, None] * S
            S = S + torch.einsum("hk,hv->hkv", k[t], beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", S, k[t])))
            out.append(torch.einsum("hkv,hk->hv", S, q[t]))
        y = self.norm(p + "norm", torch.stack(out)) * F.silu(z)
        return self.linear(p + "out_proj", y.reshape(T, Hv * Dv))

    def gated(self, prefix, x, names=("gate_proj", "up_proj", "down_proj")):
        if prefix + "gate_up_proj.weight" in self.t:
            gate, up = self.linear(prefix + "gate_up_proj", x).chunk(2, -1)
        else:
            gate, up = self.linear(prefix + names[0], x), self.linear(prefix + names[1], x)
        if "gate_and_up_swapped" in self.bugs:
            gate, up = up, gate
        if self.c["model_type"] == "gemma3_text":
            gate = F.gelu(gate, approximate="tanh")
        else:
            gate = F.silu(gate)
        return self.linear(prefix + names[2], gate * up)

    def experts(self, prefix, x):
        c, bugs = self.c, self.bugs
        mixtral = c["model_type"] == "mixtral"
        names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
        logits = self.linear(prefix + "gate", x)
        probabilities, k = logits.softmax(-1), c["num_experts_per_tok"]
        self.aux.append((logits, k))
        weights, chosen = probabilities.topk(k, -1)
        normalised = mixtral or c["model_type"].startswith("qwen3_5") or c.get("norm_topk_prob", False)
        if normalised ^ ("other_normalisation" in bugs):
            weights = weights / weights.sum(-1, keepdim=True)
        y = torch.zeros_like(x)
        for e in range(logits.shape[-1]):
            share = (weights * (chosen == e)).sum(-1, keepdim=True)
            y = y + share * self.gated(f"{prefix}experts.{e}.", x, names)
        if prefix + "shared_expert.gate_proj.weight" in self.t:
            gate = 1.0 if "shared_expert_ungated" in bugs else self.linear(prefix + "shared_expert_gate", x).sigmoid()
            y = y + gate * self.gated(prefix + "shared_expert.", x)
        return y

    def feed_forward(self, i, x):
        for part in ("mlp.", "block_sparse_moe."):
            if f"model.layers.{i}.{part}gate.weight" in self.t:
                return self.experts(f"model.layers.{i}.{part}", x)
        return self.gated(f"model.layers.{i}.mlp.", x)

    # ---- the whole model ----

    def hidden(self, row):
        c, bugs = self.c, self.bugs
        if c["model_type"] == "gpt2":
            return self.gpt2(row)
        table = self.t["model.embed_tokens.weight"]
        x = (table.detach() if "tied_embedding_untrained" in bugs else table)[row.ids]
        if c["model_type"] == "gemma3_text" and "embedding_unscaled" not in bugs:
            x = x * c["hidden_size"]**0.5
        if "embedding_unscaled" not in bugs:
            x = x * c.get("embedding_multiplier", 1)
        windows = layer_windows(c, bugs)
        residual = 1 if "residual_unscaled" in bugs else c.get("residual_multiplier", 1)
        for i in range(c["num_hidden_layers"]):
            p = f"model.layers.{i}."
            is_delta = p + "linear_attn.in_proj_qkv.weight" in self.t
            mix = (lambda y: self.delta(i, y, row)) if is_delta else (lambda y: self.attention(i, y, row, windows[i]))
            if c["model_type"] == "olmo2":
                x = x + self.norm(p + "post_attention_layernorm", mix(x))
                x = x + self.norm(p + "post_feedforward_layernorm", self.feed_forward(i, x))
            elif c["model_type"] == "gemma3_text":
                x = x + self.norm(p + "post_attention_layernorm", mix(self.norm(p + "input_layernorm", x)))
                x = x + self.norm(p + "post_feedforward_layernorm", self.feed_forward(i, self.norm(p + "pre_feedforward_layernorm", x)))
            else:
                x = x + residual * mix(self.norm(p + "input_layernorm", x))
                x = x + residual * self.feed_forward(i, self.norm(p + "post_attention_layernorm", x))
        return self.norm("model.norm", x)

    def gpt2(self, row):
        c, T = self.c, len(row.ids)
        H, D = c["n_head"], c["n_embd"] // c["n_head"]
        layernorm = lambda name, x: F.layer_norm(x, x.shape[-1:], self.t[name + ".weight"], self.t[name + ".bias"], c["layer_norm_epsilon"])
        tanh = c["activation_function"] == "gelu_new"
        x = self.t["wte.weight"][row.ids] + self.t["wpe.weight"][row.position]
        for i in range(c["n_layer"]):
            p = f"h.{i}."
            q, k, v = self.linear(p + "attn.c_attn", layernorm(p + "ln_1", x), True).view(T, 3, H, D).unbind(1)
            scores = (torch.einsum("ihd,jhd->hij", q, k) * D**-0.5).masked_fill(~row.mask(0, self.bugs), -math.inf)
            x = x + self.linear(p + "attn.c_proj", torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).reshape(T, H * D), True)
            y = F.gelu(self.linear(p + "mlp.c_fc", layernorm(p + "ln_2", x), True), approximate="tanh" if tanh else "none")
            x = x + self.linear(p + "mlp.c_proj", y, True)
        return layernorm("ln_f", x)

    def logits(self, documents):
        """Of each document: (tokens, vocabulary)."""
        row = Row(documents, self.bugs)
        x = self.hidden(row)
        head = next(self.t[name] for name in ("lm_head.weight", "model.embed_tokens.weight", "wte.weight") if name in self.t)
        z = x @ head.T
        scaling = self.c.get("logits_scaling", 1)
        z = z * scaling if "logits_multiplied" in self.bugs else z / scaling
        if "padded_vocabulary" in self.bugs:  # rows of zeros, up to a multiple of 8
            z = F.pad(z, (0, -z.shape[1] % 8))
        return list(z.split([len(ids) for ids in documents]))

    def scores(self, documents):
        """Of each document, the reward model's score at each token."""
        x = self.hidden(Row(documents, self.bugs))
        return list((x @ self.t["score.weight"].T)[:, 0].split([len(ids) for ids in documents]))

    def aux_loss(self):
        """The balance of the experts over all layers and all tokens read so far, as transformers defines it."""
        every, k = torch.cat([logits for logits, _ in self.aux]), self.aux[0][1]
        probabilities = every.softmax(-1)
        if "softmax_twice" in self.bugs:
            probabilities = probabilities.softmax(-1)
        counts = F.one_hot(every.topk(k, -1)[1], every.shape[-1]).double().sum(1).mean(0)
        return every.shape[-1] * (counts * probabilities.mean(0)).sum()

    def gradient_norm(self, loss):
        gradients = dict(zip(self.trained, torch.autograd.grad(loss, [self.t[name] for name in self.trained], allow_unused=True)))
        total = sum((g**2).sum() for g in gradients.values() if g is not None)
        if "tied_counted_twice" in self.bugs:
            total = total + (gradients["model.embed_tokens.weight"]**2).sum()
        if "replicated_counted_twice" in self.bugs:
            total = total + sum((g**2).sum() for name, g in gradients.items() if "norm" in name)
        return total.sqrt().item()
