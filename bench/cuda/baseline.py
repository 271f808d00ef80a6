#!/usr/bin/env python3
"""BF16 decode attention of PyTorch (flash and cuDNN SDPA) at the shapes of kvmosaic_cuda_bench, same method: rotated
sets, medians over replays of a captured graph of back-to-back calls. Query heads of one KV head are folded as rows.

    python3 bench/cuda/baseline.py [--json FILE] [--commit HASH]
"""
import argparse
import json
import statistics

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

SHAPES = [(32, 8, 1, 32768), (32, 8, 1, 131072), (32, 8, 8, 4096), (32, 8, 8, 32768), (32, 8, 64, 4096),
          (40, 40, 8, 32768), (40, 40, 64, 4096), (40, 8, 8, 32768)]
BACKENDS = {"SDPA flash": SDPBackend.FLASH_ATTENTION, "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION}


def measure(backend, heads, kv_heads, batch, context, rows):
    group = heads // kv_heads
    size = 2 * batch * kv_heads * context * 128 * 2
    sets = max(1, min(16, -(-(1 << 30) // size)))
    k = [torch.randn(batch, kv_heads, context, 128, device="cuda", dtype=torch.bfloat16) for _ in range(sets)]
    v = [torch.randn_like(x) for x in k]
    q = torch.randn(batch, kv_heads, group * rows, 128, device="cuda", dtype=torch.bfloat16) * 1.5
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(q, k[0], v[0])
        want = torch.softmax(q[0, 0].double() @ k[0][0, 0].double().T * 128**-0.5, -1) @ v[0][0, 0].double()
        error = float((out[0, 0].double() - want).norm() / want.norm())
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for i in range(3):
                F.scaled_dot_product_attention(q, k[i % sets], v[i % sets])
        torch.cuda.synchronize()
        graph, calls = torch.cuda.CUDAGraph(), max(4, sets)
        with torch.cuda.graph(graph):
            for i in range(calls):
                F.scaled_dot_product_attention(q, k[i % sets], v[i % sets])
    times = []
    for i in range(14):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if i >= 2:
            times.append(begin.elapsed_time(end) * 1000 / calls)
    return statistics.median(times), min(times), size, error


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--commit", default="")
    args = parser.parse_args()
    device = torch.cuda.get_device_name()
    rows = []
    # Query rows of one step; without a mask among them, which favours the baseline.
    work = [(s, 1) for s in SHAPES] + [((32, 8, 8, 32768), n) for n in (2, 4, 8, 16)]
    for (heads, kv_heads, batch, context), n in work:
        for name, backend in BACKENDS.items():
            try:
                median, least, size, error = measure(backend, heads, kv_heads, batch, context, n)
            except RuntimeError as problem:
                print(name, heads, kv_heads, batch, context, n, "not available:", str(problem).split("\n")[0])
                continue
            finally:
                torch.cuda.empty_cache()
            rows.append(dict(spec="bf16", baseline=name, device=device, isa=None, heads=heads, kv_heads=kv_heads,
                             head_dim=128, batch=batch, context=context, query_rows=n, threads=None,
                             median_us=round(median, 2), min_us=round(least, 2), bytes=size,
                             tb_s=round(size / median * 1e-6, 3), error=error, note="torch " + torch.__version__))
            print(f"{name:12s} {heads}/{kv_heads} B{batch} L{context} rows {n}: {median:9.2f} us "
                  f"{size / median * 1e-6:.2f} TB/s error {error:.1e}", flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(dict(machine=device, commit=args.commit, command="baseline.py", rows=rows), file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
