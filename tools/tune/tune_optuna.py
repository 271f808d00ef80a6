#!/usr/bin/env python3
"""The search of `kvmosaic tune --sampler tpe|nsga2`: Optuna chooses settings, the program measures them.

The program starts this script, which starts the program again as a server (`kvmosaic tune --serve ...`): one model in
memory, a JSON line in, a JSON line out. The first line from it names what is tuned; then each request
{"values": {NAME: VALUE}} is answered by {"loss", "true_bits", "known"}. Results are kept by the program. A search
that goes on asks the same questions again and gets what is known at once, so that the same seed gives the same trials
whether or not it was stopped in between.
"""
import argparse
import json
import math
import subprocess
import sys

NO_OPTUNA = 3  # exit code the program knows
TIRED = 20     # settings in a row that were measured before, after which nothing new is expected


def say(text):
    print("kvmosaic: error: " + text, file=sys.stderr)


def ask(server, request):
    """One answer, or None where the server has ended; then it has said why."""
    if request is not None:
        try:
            server.stdin.write(json.dumps(request) + "\n")
            server.stdin.flush()
        except BrokenPipeError:
            return None
    line = server.stdout.readline()
    return json.loads(line) if line else None


def suggest(trial, space):
    values = {}
    for one in space:
        if "choices" in one:
            values[one["name"]] = trial.suggest_categorical(one["name"], one["choices"])
        else:
            values[one["name"]] = trial.suggest_float(one["name"], one["low"], one["high"], log=one["log"],
                                                      step=one["step"] or None)
    return values


def known_start(values, space):
    """A default as Optuna takes it."""
    return {one["name"]: value if "choices" in one else float(value) for one, value in zip(space, values)}


def sampler_of(optuna, name, seed):
    # Nothing here depends on the number of trials, so a search with more of them begins with the same ones.
    if name == "tpe":
        return optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=10)
    return optuna.samplers.NSGAIISampler(seed=seed, population_size=10)


def search(optuna, server, name, seed, trials):
    opened = ask(server, None)
    if opened is None:
        return
    space = opened["space"]
    study = optuna.create_study(directions=["minimize", "minimize"], sampler=sampler_of(optuna, name, seed))
    starts = opened["defaults"]
    for values in starts:
        study.enqueue_trial(known_start(values, space))
    tried, repeats, number = set(), 0, 0
    while len(tried) < trials and repeats < TIRED:
        trial = study.ask()
        answer = ask(server, {"values": suggest(trial, space)})
        if answer is None:
            return
        if "error" in answer:
            say(answer["error"])
            server.stdin.close()
            sys.exit(1)
        losses = [answer["loss"], answer["true_bits"]]
        if all(isinstance(x, float) and math.isfinite(x) for x in losses):
            study.tell(trial, losses)
        else:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        number += 1
        if number <= len(starts):
            continue  # a default is no trial of the search
        repeats = 0 if answer["trial"] not in tried else repeats + 1
        tried.add(answer["trial"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="print Optuna's version and end")
    parser.add_argument("--sampler", choices=["tpe", "nsga2"], default="tpe")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("server", nargs=argparse.REMAINDER, help="-- and the server's command")
    o = parser.parse_args()
    try:
        import optuna
    except ImportError:
        return NO_OPTUNA
    if o.check:
        print(optuna.__version__)
        return 0
    import warnings
    warnings.simplefilter("ignore")  # the samplers' options count as experimental
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    server = subprocess.Popen(o.server[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        search(optuna, server, o.sampler, o.seed, o.trials)
        server.stdin.close()
    except BrokenPipeError:
        pass
    except KeyboardInterrupt:
        server.wait()
        return 130
    return server.wait()


if __name__ == "__main__":
    sys.exit(main())
