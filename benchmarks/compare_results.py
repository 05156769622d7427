"""Compare two result files, or two folders of them: time ratios per row; exit 1 on a regression past the limit.

    python benchmarks/compare_results.py results/nvidia-h200 /tmp/new/nvidia-h200 --limit 1.05

Rows are matched by their ``case``. A row that passed before and does not now, or is missing, is a regression too, and
so is a missing file; a new row or file is not. Results of different models or dtypes are refused.
"""

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import common

# isort: split
import cli


def pairs(before, after):
    """(before, after) result files to compare, the two themselves or those of the same name in two folders, and the
    names of files that only ``before`` has."""
    for path in (before, after):
        if not path.exists():
            raise cli.UsageError(f"{path} does not exist")
    if before.is_dir() != after.is_dir():
        raise cli.UsageError(f"{before} and {after} must be two files or two folders")
    if not before.is_dir():
        return [(before, after)], []
    old, new = ({path.name for path in folder.glob("*.json")} for folder in (before, after))
    if not old & new:
        raise cli.UsageError(f"{before} and {after} have no result file of the same name")
    return [(before / name, after / name) for name in sorted(old & new)], sorted(old - new)


def case_key(case):
    return tuple(sorted((key, str(value)) for key, value in case.items()))


def compare(before, after, limit):
    """(lines of the printed table, regressions) of two contents of the same script."""
    if before["script"] != after["script"]:
        raise cli.UsageError(f"results of {before['script']} and {after['script']} cannot be compared")
    for name in ("model_path", "dtype"):
        old, new = (content["configuration"].get(name) for content in (before, after))
        if old != new:
            raise cli.UsageError(f"results of {before['script']} with {name} {old} and {new} cannot be compared")
    newer = {case_key(row["case"]): row for row in after["rows"]}
    lines, regressions = [], []
    for old in before["rows"]:
        case = ", ".join(f"{key} {value}" for key, value in old["case"].items())
        new = newer.get(case_key(old["case"]))
        if new is None:
            lines.append((case, old.get("median_ms", old["status"]), "missing", "-"))
            if old["status"] == common.PASSED:
                regressions.append(f"{before['script']}: {case}: missing")
            continue
        if "median_ms" in old and "median_ms" in new:
            ratio = new["median_ms"] / old["median_ms"]
            lines.append((case, f"{old['median_ms']:.5f}", f"{new['median_ms']:.5f}", f"{ratio:.3f}"))
            if ratio > limit:
                regressions.append(f"{before['script']}: {case}: {ratio:.3f} times as long")
        elif old["status"] == common.PASSED != new["status"]:
            lines.append((case, common.PASSED, new["status"], "-"))
            regressions.append(f"{before['script']}: {case}: {new['status']} ({new.get('reason', 'no reason given')})")
    return lines, regressions


def main():
    parser = cli.parser(__doc__)
    parser.add_argument("before", type=Path, help="result file or folder")
    parser.add_argument("after", type=Path, help="result file or folder")
    parser.add_argument("--limit", type=float, default=1.05, help="largest ratio after / before that still passes")
    args = parser.parse_args()
    if not 0 < args.limit < math.inf:
        raise cli.UsageError(f"--limit must be above 0 and finite, got {args.limit:g}")
    files, missing = pairs(args.before, args.after)
    regressions = [f"{name}: missing in {args.after}" for name in missing]
    for before, after in files:
        contents = common.load_results(before), common.load_results(after)
        lines, found = compare(*contents, args.limit)
        regressions += found
        print(f"{contents[0]['script']}: {origin(contents[0])} -> {origin(contents[1])}")
        cli.table(("case", "before ms", "after ms", "ratio"), lines)
    for regression in regressions:
        print(regression)
    count = len(regressions)
    return cli.verdict(not regressions, f"{count} regression{'' if count == 1 else 's'}, limit {args.limit:g}")


def origin(content):
    environment = content["environment"]
    return f"{environment.get('gpu', 'no GPU')}, commit {environment['commit']}, {content['date'][:10]}"


if __name__ == "__main__":
    cli.run(main)
