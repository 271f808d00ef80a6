#!/usr/bin/env python3
"""`kvmosaic serve` under load: conversations shaped like public traces of chat services, eight at a time.

    serve_load.py [--requests N] [--model NAME] [--cache SPEC] [--slots N] [--seed N] [--json FILE]

Needs KVMOSAIC_PROGRAM. Lengths follow the published percentiles of a production chat trace (prompts of 1,020 tokens at
the median, 2,735 at the 90th percentile, 4,142 at the 99th; answers of 129, 424 and 601), scaled to a slot's context;
the text is made here. Conversations share a few system prompts and have up to three turns, which continue one another.
Each hides a pair of words and asks for it in every turn: the pair must come back in that conversation, and no pair of
another one ever. Some requests are cancelled half way, some are longer than a slot.
"""
import argparse
import concurrent.futures
import json
import os
import random
import sys
import tempfile
import time

from served import Server

FIRST = "amber bronze copper crimson golden hidden ivory jade lonely marble noble olive purple quiet rapid silver".split()
SECOND = "anchor badger castle dragon engine falcon garden harbor island jacket kettle ladder magnet needle orchard piano".split()
SYSTEM = ["You keep notes for a library. Every note is short, and nothing is left out.",
          "This is the log of a weather station on a hill. The keeper writes it by hand.",
          "A travel diary. The writer counts days, meals and miles, and rarely complains."]
WHO = "The keeper,A visitor,Our neighbour,The old driver,My sister,The baker,A student,The captain".split(",")
DID = "walked to,looked at,talked about,waited near,painted,cleaned,remembered,left".split(",")
WHAT = "the bridge,the long road,a small boat,the market,the second house,the river,an open window,the mill".split(",")
PERCENTILES = [(0.0, 0.1), (0.5, 0.25), (0.9, 0.66), (0.99, 0.97), (1.0, 1.0)]  # of the longest prompt that is sent


def sentence(rng):
    return "%s %s %s on day %d. " % (rng.choice(WHO), rng.choice(DID), rng.choice(WHAT), rng.randint(1, 99))


def filler(rng, tokens):
    text = ""
    while len(text) < 4 * tokens:  # some four characters a token
        text += sentence(rng)
    return text


def share(rng):
    x = rng.random()
    for (p0, s0), (p1, s1) in zip(PERCENTILES, PERCENTILES[1:]):
        if x <= p1:
            return s0 + (s1 - s0) * (x - p0) / (p1 - p0)
    return 1.0


class LoadServer(Server):
    """Slots of the same size, their states in a folder, and no cache of prompts beside them."""

    def __init__(self, program, model, spec, slots, slot_tokens, log, more=()):
        super().__init__(program, ["-m", model, "--cache", spec, "--ctx", slots * slot_tokens, *more, "-np", slots, "-t",
                                   os.cpu_count() or 2, "--cache-ram", 0, "--slot-save-path",
                                   tempfile.mkdtemp(prefix="kvmosaic-slots-"), "--no-kv-unified"], log)


class Conversation:
    def __init__(self, number, pair, slot_tokens, seed):
        self.rng = random.Random(seed * 1000 + number)
        self.pair = pair
        self.turns = 1 + self.rng.randrange(3)
        self.tokens = int((slot_tokens - 120) * share(self.rng))
        self.text = self.rng.choice(SYSTEM) + "\n" + filler(self.rng, self.tokens // 3)
        self.text += "\nThe secret words are: %s.\n" % pair + filler(self.rng, self.tokens // 3)
        self.cancelled = self.rng.random() < 0.1

    def play(self, server, all_pairs, result):
        for turn in range(self.turns):
            prompt = self.text + "\nOnce more, the secret words are:"
            body = {"prompt": prompt, "n_predict": 8, "temperature": 0, "cache_prompt": True}
            if self.cancelled and turn == self.turns - 1:
                with server.open("/completion", dict(body, stream=True, n_predict=200, ignore_eos=True)) as reply:
                    for _ in range(3):
                        reply.readline()
                result["cancelled"] += 1  # the connection closes here, the answer is not finished
                return
            status, reply = server.post("/completion", body)
            result["requests"] += 1
            if status != 200:
                result["refused"].append(reply)
                return
            answer = reply["content"]
            result["cached"] += reply["timings"].get("cache_n", 0)
            result["prompt"] += reply["timings"].get("cache_n", 0) + reply["timings"]["prompt_n"]
            result["found"] += self.pair in answer
            others = [p for p in all_pairs if p != self.pair and p in answer]
            if others:
                result["leaks"].append((self.pair, answer))
            self.text = prompt + answer + ".\n" + filler(self.rng, self.tokens // 9)


def pairs(count, seed):
    every = ["%s %s" % (a, b) for a in FIRST for b in SECOND]
    random.Random(seed).shuffle(every)
    return every[:count]


def run(server, first, count, slots, slot_tokens, seed, words):
    result = {"requests": 0, "found": 0, "cached": 0, "prompt": 0, "cancelled": 0, "refused": [], "leaks": []}
    talks = [Conversation(first + i, words[(first + i) % len(words)], slot_tokens, seed) for i in range(count)]
    with concurrent.futures.ThreadPoolExecutor(slots) as pool:
        for done in [pool.submit(talk.play, server, words, result) for talk in talks]:
            done.result()
    return result


def too_long(server, slot_tokens):
    """A prompt above a slot's context: refused by a sentence, and the next one is served."""
    status, reply = server.post("/completion", {"prompt": filler(random.Random(1), 2 * slot_tokens), "n_predict": 4})
    after, _ = server.post("/completion", {"prompt": "One two three", "n_predict": 2})
    return status, json.dumps(reply), after


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--cache", default="kivi:bits=4")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--slot-tokens", type=int, default=768)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", default="")
    o = parser.parse_args()
    words = pairs(len(FIRST) * len(SECOND), o.seed)
    start = time.time()
    report = {"model": o.model, "spec": o.cache, "slots": o.slots, "slot_tokens": o.slot_tokens}
    with tempfile.TemporaryFile("w+") as log:
        server = LoadServer(os.environ["KVMOSAIC_PROGRAM"], o.model, o.cache, o.slots, o.slot_tokens, log)
        warm = run(server, 0, o.slots, o.slots, o.slot_tokens, o.seed, words)  # buffers grow to their size
        server.erase_slots(o.slots)
        report["resident_mib_before"] = server.resident_mib()
        total, first = None, o.slots
        while not total or total["requests"] + total["cancelled"] < o.requests:
            part = run(server, first, 2 * o.slots, o.slots, o.slot_tokens, o.seed, words)
            first += 2 * o.slots
            total = part if not total else {key: total[key] + part[key] for key in total}
            print("%d requests, %d secrets found, %d cancelled, %d refused, %d leaks, %.0f s" %
                  (total["requests"], total["found"], total["cancelled"], len(total["refused"]), len(total["leaks"]),
                   time.time() - start), file=sys.stderr)
        report.update(total)
        report["too_long"] = too_long(server, o.slot_tokens)
        server.erase_slots(o.slots)
        report["resident_mib_after"] = server.resident_mib()
        report["exit_code"] = server.stop()
    report["warm_found"] = "%d of %d" % (warm["found"], warm["requests"])
    report["seconds"] = round(time.time() - start)
    text = json.dumps(report, indent=2)
    print(text)
    if o.json:
        with open(o.json, "w") as file:
            file.write(text + "\n")
    good = not report["leaks"] and not report["refused"] and report["exit_code"] == 0 and report["too_long"][0] == 400 \
        and report["too_long"][2] == 200 and report["found"] >= 0.9 * report["requests"] \
        and report["resident_mib_after"] < report["resident_mib_before"] + 24
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
