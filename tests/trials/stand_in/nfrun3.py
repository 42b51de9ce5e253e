"""Runs semdiff of each seed plain and under sidestep, and prints where they differ, if plain agrees with itself (three times)."""
import subprocess, sys, os, time
first, secs, args = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
here = os.path.dirname(os.path.abspath(__file__)); prog = here + "/nf3"; steps = "80"
def run(pre, seed):
    try:
        r = subprocess.run([*pre, prog, str(seed), steps], capture_output=True, text=True, timeout=60)
        return r.stdout.splitlines() + [f"rc {r.returncode}"] + ([r.stderr] if r.stderr else [])
    except subprocess.TimeoutExpired as e:
        return (e.stdout or b"").decode().splitlines() + ["TIMEOUT"]
def where(a, b):
    for i, (x, y) in enumerate(zip(a, b)):
        if x != y: return i
    return None if len(a) == len(b) else min(len(a), len(b))
end = time.time() + secs; seed = first; same = 0; unstable = 0; diffs = 0
while time.time() < end:
    p, s = run([], seed), run(args, seed)
    i = where(p, s)
    if i is None: same += 1
    else:
        p2, s2 = run([], seed), run(args, seed); j = where(p, p2)
        if j is not None and j <= i: unstable += 1
        else:
            p3 = run([], seed); j = where(p, p3)
            if j is not None and j <= i: unstable += 1
            else:
                diffs += 1; k = where(p, s2)
                print(f"SEED {seed} differs at line {i}; again at {k}")
                print("   before:", p[i-1] if i else ""); print("   plain:", p[i] if i < len(p) else "-"); print("   under:", s[i] if i < len(s) else "-"); print("   again:", s2[i] if i < len(s2) else "-", flush=True)
    seed += 1
print(f"seeds {seed-first} same {same} unstable {unstable} different {diffs}", flush=True)
