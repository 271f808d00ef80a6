#!/usr/bin/env python3
"""A whole decode loop on the GPU, one captured graph a step: random bf16 weights in the shape of a real model, PyTorch's
products, and attention from kvmosaic's cache or from a BF16 cache (the faster of flash and cuDNN SDPA), at the same
batch and at the largest that fits.

    python3 bench/cuda/decode_loop.py --library build/cuda/bench/cuda/libkvmosaic_loop.so [--json FILE] [--commit HASH]
"""
import argparse
import ctypes
import json
import statistics

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

SHAPES = {
    "llama-3-8b": dict(layers=32, hidden=4096, heads=32, kv_heads=8, inner=14336, vocab=128256),
    "llama-2-13b": dict(layers=40, hidden=5120, heads=40, kv_heads=40, inner=13824, vocab=32000),
}
DIM, STEPS, WARM = 128, 24, 4
BACKENDS = {"SDPA flash": SDPBackend.FLASH_ATTENTION, "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION}


class Library:
    """The calls of loop.cu; each raises what it is told."""

    def __init__(self, path):
        self.lib = ctypes.CDLL(path)
        self.lib.kvmosaic_loop_bytes.restype = ctypes.c_int64
        self.error = ctypes.create_string_buffer(512)

    def __call__(self, name, *args):
        if getattr(self.lib, "kvmosaic_loop_" + name)(*args, self.error, ctypes.c_int(512)):
            raise RuntimeError(self.error.value.decode())


class Packed:
    """Attention over a cache of kvmosaic."""

    def __init__(self, library, spec, shape, batch, context, more=STEPS + WARM + 8):
        self.library, self.handle = library, ctypes.c_void_p()
        library("create", spec.encode(), shape["layers"], shape["heads"], shape["kv_heads"], DIM, batch,
                ctypes.c_int64(context + more), ctypes.byref(self.handle))
        self.bytes = library.lib.kvmosaic_loop_bytes(self.handle)
        if context:
            source = torch.randn(8192, DIM, device="cuda").half()
            library("fill", self.handle, ctypes.c_int64(context), ctypes.c_void_p(source.data_ptr()),
                    ctypes.c_int64(8192))

    def step(self):
        self.library("step", self.handle, ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))

    def layer(self, i, q, k, v):
        out = torch.empty_like(q)
        self.library("layer", self.handle, i, *(ctypes.c_void_p(x.data_ptr()) for x in (q, k, v, out)),
                     ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
        return out

    def close(self):
        self.library.lib.kvmosaic_loop_destroy(self.handle)


class Plain:
    """Attention over BF16 rows that lie as SDPA likes them; every step writes the row behind `context` again."""

    def __init__(self, shape, batch, context, backend, room=8):
        size = (shape["layers"], batch, shape["kv_heads"], context + room, DIM)
        self.k, self.v = (torch.empty(size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        for cache in (self.k, self.v):
            for layer in cache:
                layer.normal_()
        self.bytes = 2 * self.k.numel() * 2
        self.at, self.backend = context, backend

    def step(self):
        pass

    def layer(self, i, q, k, v):
        self.k[i, :, :, self.at], self.v[i, :, :, self.at] = k, v
        batch, kv_heads = k.shape[:2]
        rows = q.view(batch, kv_heads, -1, DIM)
        with sdpa_kernel(self.backend):
            return F.scaled_dot_product_attention(rows, self.k[i, :, :, : self.at + 1],
                                                  self.v[i, :, :, : self.at + 1]).reshape(q.shape)

    def close(self):
        del self.k, self.v


class Model:
    def __init__(self, shape):
        def weights(rows, columns):
            return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * rows**-0.5

        hidden, heads = shape["hidden"], shape["heads"] + 2 * shape["kv_heads"]
        self.shape = shape
        self.layers = [(weights(hidden, heads * DIM), weights(shape["heads"] * DIM, hidden),
                        weights(hidden, 2 * shape["inner"]), weights(shape["inner"], hidden))
                       for _ in range(shape["layers"])]
        self.top = weights(hidden, shape["vocab"])
        angle = torch.randn(DIM // 2, device="cuda")
        self.cos, self.sin = angle.cos().bfloat16(), angle.sin().bfloat16()

    def turn(self, x):
        low, high = x.chunk(2, -1)
        return torch.cat((low * self.cos - high * self.sin, high * self.cos + low * self.sin), -1)

    def step(self, state, attention):
        heads, kv_heads, size = self.shape["heads"], self.shape["kv_heads"], (self.shape["hidden"],)
        attention.step()
        for i, (qkv, out, up, down) in enumerate(self.layers):
            rows = (F.rms_norm(state, size) @ qkv).view(state.shape[0], -1, DIM)
            q, k, v = rows.split((heads, kv_heads, kv_heads), 1)
            mixed = attention.layer(i, self.turn(q).contiguous(), self.turn(k).contiguous(), v.contiguous())
            state = state + mixed.view(state.shape[0], -1) @ out
            gate, inner = (F.rms_norm(state, size) @ up).chunk(2, -1)
            state = state + (F.silu(gate) * inner) @ down
        return state, F.rms_norm(state, size) @ self.top


def milliseconds(model, attention, batch):
    """Median time of a step of the captured loop."""
    state = torch.randn(batch, model.shape["hidden"], device="cuda", dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        model.step(state, attention)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model.step(state, attention)
    times = []
    for i in range(STEPS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if i >= WARM:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def check(library, spec):
    """Two layers from an empty cache: the same tokens through both caches, while all rows are raw and after."""
    shape = dict(SHAPES["llama-3-8b"], layers=2, vocab=1024)
    model = Model(shape)
    torch.manual_seed(1)
    inputs = torch.randn(300, 3, shape["hidden"], device="cuda", dtype=torch.bfloat16)
    packed, errors = Packed(library, spec, shape, 3, 0, more=400), []
    plain = Plain(shape, 3, 0, SDPBackend.FLASH_ATTENTION, room=301)
    for t, state in enumerate(inputs):
        plain.at = t
        want, got = model.step(state, plain)[1].double(), model.step(state, packed)[1].double()
        errors.append(float((got - want).norm() / want.norm()))
    packed.close()
    return max(errors[:120]), statistics.median(errors[200:])


def largest(per_sequence, free):
    return max(1, int((free - (4 << 30)) // per_sequence))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", required=True)
    parser.add_argument("--spec", default="kivi:bits=2,group=128")
    parser.add_argument("--contexts", default="4096,16384,32768")
    parser.add_argument("--json")
    parser.add_argument("--commit", default="")
    args = parser.parse_args()
    library, device, rows = Library(args.library), torch.cuda.get_device_name(), []
    torch.set_grad_enabled(False)
    raw, packed = check(library, args.spec)
    print(f"output against BF16, relative L2: {raw:.1e} while all rows are raw, {packed:.2f} with packed ones", flush=True)
    if raw > 0.05:
        raise SystemExit("the two loops differ while nothing is packed")
    for name, shape in SHAPES.items():
        model = Model(shape)
        torch.cuda.synchronize()
        for context in map(int, args.contexts.split(",")):
            free = torch.cuda.mem_get_info()[0]
            plain_bytes = 4 * shape["layers"] * shape["kv_heads"] * (context + 8) * DIM
            probe = Packed(library, args.spec, shape, 2, context)
            packed_bytes = probe.bytes // 2
            probe.close()
            plain_most, packed_most = largest(plain_bytes, free), largest(packed_bytes, free)
            best = {}
            for batch in sorted({plain_most, packed_most}):
                kinds = [("kvmosaic", None)] + [(b, BACKENDS[b]) for b in BACKENDS if batch <= plain_most]
                for kind, backend in kinds:
                    cache = None
                    try:
                        cache = (Plain(shape, batch, context, backend) if backend else
                                 Packed(library, args.spec, shape, batch, context))
                        time = milliseconds(model, cache, batch)
                    except RuntimeError as problem:
                        print(name, context, batch, kind, "not available:", str(problem).split("\n")[0], flush=True)
                        continue
                    finally:
                        if cache:
                            cache.close()
                        del cache
                        torch.cuda.empty_cache()
                    best[kind, batch] = batch / time * 1000
                    rows.append(dict(spec=args.spec if backend is None else "bf16", device=device, model=name,
                                     baseline=None if backend is None else kind, batch=batch, context=context,
                                     step_ms=round(time, 3), tokens_s=round(batch / time * 1000, 1),
                                     cache_bytes=batch * (packed_bytes if backend is None else plain_bytes)))
                    print(f"{name:12s} L{context:<6d} B{batch:<5d} {kind:10s} {time:8.2f} ms a step "
                          f"{batch / time * 1000:9.0f} tokens/s", flush=True)
            plain = max((v for (k, b), v in best.items() if k != "kvmosaic"), default=None)
            same, most = best.get(("kvmosaic", plain_most)), best.get(("kvmosaic", packed_most))
            if plain and same and most:
                print(f"{name:12s} L{context:<6d} same batch {same / plain:.2f} x, largest batch {most / plain:.2f} x "
                      f"({plain_most} and {packed_most} sequences)", flush=True)
        del model
        torch.cuda.empty_cache()
    if args.json:
        with open(args.json, "w") as file:
            json.dump(dict(machine=device, commit=args.commit, command="decode_loop.py", torch=torch.__version__,
                           error_raw=raw, error_packed=packed, rows=rows), file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
