#!/usr/bin/env python3
"""What a cache may lose on the real model, two-sided (L5: short answers read well long before a cache is right; so the
gates are KL and top-1 against full precision, on prose and on a structured text). A gate that is missed from below is a
cache that is not quantized at all. See support.py. What other models and texts show stands in docs/results.md."""
import json
import random
import sys

from support import Case, SAMPLE, main

# spec: (mean KL, top-1) as measured on prose, the same on the structured text. The gates are half and twice the KL, and
# six points of top-1.
MEASURED = {
    "q8_0": [(0.00053, 0.984), (0.00014, 0.992)],
    "kivi:bits=4": [(0.0055, 0.969), (0.0027, 0.986)],
    "kivi:bits=2": [(0.215, 0.773), (0.141, 0.893)],
    "mixkvq": [(0.0344, 0.928), (0.0154, 0.963)],
    "pnmix": [(0.0793, 0.871), (0.0531, 0.947)],
    "innerq": [(0.0639, 0.900), (0.0461, 0.941)],
}
WINDOW = ["--window", 640, "--windows", 1, "--score-from", 128, "--weights", "f16"]


def structured():
    """Rows of JSON with keys that repeat and numbers that do not."""
    rng = random.Random(7)
    words = ["copper", "maple", "harbour", "violet", "granite", "lantern", "meadow", "saddle"]
    return "\n".join(json.dumps({"id": 1000 + i, "name": rng.choice(words), "size": rng.randrange(10, 99),
                                 "tags": [rng.choice(words), rng.choice(words)], "done": rng.random() < 0.5})
                     for i in range(60)) + "\n"


class Gates(Case):
    def measure(self, text):
        words = ["compare", "-m", "tiny", "-f", text, *WINDOW, "--json", "-"]
        for spec in MEASURED:
            words += ["--cache", spec]
        return {row["spec"]: row for row in self.good(*words).json()["rows"]}

    def test_losses_lie_in_their_bands(self):
        for number, text in enumerate([SAMPLE, self.path("table.json", structured())]):
            rows = self.measure(text)
            self.assertLess(rows["floor"]["kl_mean"], 1e-4)
            for spec, measured in MEASURED.items():
                with self.subTest(spec=spec, text=("prose", "structured")[number]):
                    kl, top1 = measured[number]
                    self.assertGreater(rows[spec]["kl_mean"], 0.5 * kl)
                    self.assertLess(rows[spec]["kl_mean"], 2.0 * kl)
                    self.assertGreaterEqual(rows[spec]["top1"], top1 - 0.06)


if __name__ == "__main__":
    sys.exit(main(Gates))
