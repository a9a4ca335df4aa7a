"""Open engines whose program.json was edited at random and signed again, and run a step of those that open.

    python -m tests.engine_format.edited_programs ENGINE COUNT FOLDER < ANSWER

Ends with the number of engines that were refused; a line before each says which is next, so that who sees this process
crash knows by what. ANSWER: token ids that the whole engine gives, as JSON; an edited one must give the same.
"""

from __future__ import annotations

import copy
import json
import random
import sys
import traceback
from pathlib import Path
from typing import Any

from llmc.engine_format import engine_files
from llmc.engine_format.manifest import content_digest
from llmc.errors import LlmcError
from llmc.runtime.loading import load
from llmc.runtime.sampling.sampling_params import SamplingParams
from tests.listed_files import file_record

PROMPT = [1, 2, 3]
_NUMBERS = (-1, 0, 1, 2, 3, 7, 64, 1 << 20, (1 << 31) - 1, 1 << 31, 1 << 40, 1 << 62, 1 << 64, 1 << 200)
_OTHERS: tuple[Any, ...] = (None, True, "", "F32", "I8", "BF16", "T", "rows", "nothing", [], {}, 0.5, -7)


def answer(engine: Path) -> list[int]:
    """The tokens that an engine continues PROMPT with."""
    with load(engine, threads=1, kv_cache_bytes=64 << 20) as opened:
        (completion,) = opened.generate(PROMPT, SamplingParams(max_tokens=2, ignore_eos=True))
        return list(completion.token_ids)


def edited(program: dict[str, Any], chance: random.Random) -> tuple[dict[str, Any], str]:
    """A program with one to three edits, and what they are."""
    program, said = copy.deepcopy(program), []
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        # What the runtime reads is much shorter than the launches.
        key = chance.choice([k for k in program if program[k]] + ["limits", "arena", "weights", "caches", "buffers"])
        said.append(_edit(program, key, chance, key) if program.get(key) else f"{key} is not there")
    return program, "; ".join(said)


def _edit(owner: Any, key: Any, chance: random.Random, where: str) -> str:
    value = owner[key]
    if isinstance(value, list | dict) and value and chance.random() < 0.85:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        one, other = chance.choice(keys), chance.choice(keys)
        action = chance.random()
        if action < 0.75:
            return _edit(value, one, chance, f"{where}.{one}")
        if action < 0.83:
            value[one], value[other] = value[other], value[one]
            return f"swapped {where}.{one} and {other}"
        if action < 0.93:
            del value[one]
            return f"deleted {where}.{one}"
        if isinstance(value, list):
            value.append(copy.deepcopy(value[one]))
        else:
            value["extra"] = value[one]
        return f"repeated {where}.{one}"
    if type(value) is int and chance.random() < 0.9:
        owner[key] = chance.choice([*_NUMBERS, value + 1, value - 1, value * 2, value // 2, -value])
    else:
        owner[key] = chance.choice(_OTHERS)
    return f"{where}: {value!r:.40} -> {owner[key]!r:.40}"


def linked_engine(source: Path, place: Path, program: dict[str, Any]) -> Path:
    """The engine with another program.json, which its manifest lists; all other files are links."""
    manifest = json.loads((source / "manifest.json").read_text(encoding="utf-8"))
    for name in manifest["files"]:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        if name != "program.json":
            (place / name).symlink_to(source / name)
    text = json.dumps(program).encode()
    (place / "program.json").write_bytes(text)
    record = file_record(text)
    manifest["files"]["program.json"] = {"bytes": record.bytes, "sha256": record.sha256, "xxh3": record.xxh3}
    # Whoever edits the one edits the other.
    manifest["limits"] = program.get("limits")
    manifest["model"]["vocab_size"] = program.get("vocab_size")
    del manifest["manifest_sha256"]
    manifest["manifest_sha256"] = content_digest(manifest)
    (place / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return place


def main() -> None:
    """Exit code 1 with the edit and the traceback for what is neither refused nor right."""
    source, count, folder = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    expected = json.loads(sys.stdin.read())
    program = engine_files(source).json("program.json")
    refused = 0
    for seed in range(count):
        changed, what = edited(program, random.Random(seed))
        print(f"edit {seed}: {what}", flush=True)
        try:
            actual = answer(linked_engine(source, folder / str(seed), changed))
            assert actual == expected, f"the answer is {actual}, not {expected}"
        except LlmcError:
            refused += 1
        except BaseException:
            traceback.print_exc()
            sys.exit(1)
    print(refused)


if __name__ == "__main__":
    main()
