"""Print an engine's C++: the loops, then open, step and close over kernels/api.h. All choices are made before."""

import re
from collections.abc import Iterator, Mapping, Sequence

from llmc.codegen.cpp.kernel_api import enumerator, kernel_api, layout_assertion
from llmc.codegen.cpp.kernel_library import PAGED_ATTENTION, RAGGED_ATTENTION
from llmc.codegen.cpp.printer import pointer, print_loop, wrapped
from llmc.codegen.kernel_ir import Loop
from llmc.codegen.origin import describe, one_line
from llmc.program import LOOP, Affine, Launch, Origin, Program, StepOutput, group_input
from llmc.program.engine_structs import ENGINE_STRUCTS
from llmc.program.launch_arguments import Argument, Count, Operand, Rows
from llmc.program.program_interface import interface_text

_COUNTS = {
    Count.TOKENS: "T",
    Count.LOGIT_ROWS: "L",
    Count.REQUESTS: "R",
    Count.MAX_BLOCKS: "step->max_blocks",
}
_INPUTS = {"logit_rows": "step->logit_row_ids", "choices": "choices"}


def print_source(program: Program, loops: Mapping[Loop, str], model: str) -> str:
    """The whole engine.cpp. loops: each loop and its function's name."""
    first_use: dict[str, Origin] = {}
    for launch in program.launches:
        first_use.setdefault(launch.kernel, launch.origin)
    parts = [_head(program, model)]
    parts += [print_loop(name, loop, describe(first_use[name])) for loop, name in loops.items()]
    parts.append(_engine(program))
    parts.append(_step(program))
    return "\n".join(parts)


def _head(program: Program, model: str) -> str:
    assertions = "\n".join(map(layout_assertion, ENGINE_STRUCTS))
    calls = [launch for launch in program.launches if launch.family != LOOP]
    readers = [read for launch in calls if isinstance(read := launch.arguments.get("read"), str)]
    declarations = kernel_api().declared((launch.kernel for launch in calls), readers)
    return f"""// The step of {one_line(model)}: {len(program.launches)} launches, {len(program.weights)} weights.
// Generated; each launch says which op, rewrite and line of the model's source it comes from.
#include <stddef.h>
#include <stdlib.h>
#include <time.h>

#include "loops.h"

using namespace llmc;

// As the runtime fills them.
{assertions}

// As the kernels declare them.
{declarations}

template <class Arguments>
static inline void run(void (*kernel)(LlmcPool*, const Arguments*), LlmcPool* pool, const Arguments& arguments) {{
  kernel(pool, &arguments);
}}
"""


def _engine(program: Program) -> str:
    scratch = dict.fromkeys(_scratch(program))
    lines = "\n".join(f"  need({call});" for call in scratch)
    return f"""struct LlmcEngine {{
  const void* const* weights;
  void* const* caches;
  const void* const* adapters;
  char* arena;
  LlmcPool* pool;
  LlmcRanks* ranks;
  int64_t* times;
}};

// When the launch before `number` ended, if anybody wants to know.
static inline void mark(int64_t* times, int64_t number) {{
  if (times == nullptr) return;
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  times[number] = static_cast<int64_t>(now.tv_sec) * 1000000000 + now.tv_nsec;
}}

static int64_t scratch_bytes() {{
  int64_t bytes = 0;
  auto need = [&](int64_t more) {{ bytes = more > bytes ? more : bytes; }};
{lines}
  return bytes;
}}

int32_t llmc_engine_abi(void) {{ return LLMC_ENGINE_ABI; }}

int64_t llmc_engine_ranks_bytes(int32_t ranks) {{ return llmc_ranks_bytes(ranks); }}

const char* llmc_engine_interface(void) {{
  return
{literal(interface_text(program))};
}}

LlmcEngine* llmc_engine_open(const LlmcBindings* bindings) {{
  LlmcEngine* engine = static_cast<LlmcEngine*>(malloc(sizeof(LlmcEngine)));
  if (engine == nullptr) return nullptr;
  LlmcPool* pool = llmc_pool_create(bindings->threads, scratch_bytes());
  if (pool == nullptr) {{
    free(engine);
    return nullptr;
  }}
  *engine = {{bindings->weights, bindings->caches, bindings->adapters, static_cast<char*>(bindings->arena), pool,
             bindings->ranks, nullptr}};
  return engine;
}}

void llmc_engine_choose(LlmcEngine* engine, const LlmcChooseRows* rows) {{ llmc_choose_rows(engine->pool, rows); }}

void llmc_engine_time_launches(LlmcEngine* engine, int64_t* times) {{ engine->times = times; }}

void llmc_engine_close(LlmcEngine* engine) {{
  llmc_pool_destroy(engine->pool);
  free(engine);
}}
"""


def literal(text: str) -> str:
    """A C++ string literal, line by line."""
    lines = []
    for line in text.splitlines():
        plain = "".join(chr(b) if 32 <= b < 127 and b not in b'"?\\\\' else f"\\{b:03o}" for b in line.encode())
        lines.append(f'      "{plain}\\n"')
    return "\n".join(lines)


def _scratch(program: Program) -> Iterator[str]:
    values = [value for launch in program.launches for value in launch.arguments.values()]
    times = max((value.times for value in values if isinstance(value, Rows)), default=1)
    tokens = max(program.limits.max_batch_tokens, times * program.limits.max_logit_rows)
    yield f"llmc_choose_rows_scratch({program.vocab_size})"
    channels = [x.number("in") for x in program.launches if "in" in x.arguments]
    slots = max((x.number("slots") for x in program.launches if "experts" in x.arguments), default=1)
    if channels:
        yield f"llmc_linear_scratch({tokens * slots}, {max(channels)})"
    for launch in program.launches:
        if launch.family in (PAGED_ATTENTION, RAGGED_ATTENTION):
            shape = (launch.arguments[name] for name in ("heads", "kv_heads", "head_dim", "value_dim"))
            yield f"llmc_paged_attention_scratch({', '.join(map(str, shape))})"


_STEP = "void llmc_engine_step(LlmcEngine* engine, const LlmcStep* step)"
_CHOICE = "const LlmcChooseRows* choices"
# For an engine whose steps may return tokens instead of logits: one function for both.
_EITHER = f"static void run_step(LlmcEngine* engine, const LlmcStep* step, {_CHOICE})"
_ENTRIES = f"""
{_STEP} {{ run_step(engine, step, nullptr); }}

void llmc_engine_step_choosing(LlmcEngine* engine, const LlmcStep* step, {_CHOICE}) {{
  run_step(engine, step, choices);
}}
"""


def _step(program: Program) -> str:
    can_choose = any(launch.wanted for launch in program.launches)
    lines = [
        f"{_EITHER if can_choose else _STEP} {{",
        "  LlmcPool* const pool = engine->pool;",
        "  int64_t* const times = engine->times;",
        "  const void* const* const w = engine->weights;",
        "  [[maybe_unused]] const int64_t T = step->tokens, L = step->logit_rows, R = step->requests;",
        "",
    ]
    for buffer in program.buffers:
        kind = pointer(buffer.dtype, written=True)
        place = f"reinterpret_cast<{kind}>(engine->arena + {_affine(buffer.offset)})"
        lines.append(f"  {kind} const {_variable(buffer.name)} = {place};")
    printer = _LaunchPrinter(program)
    lines.append("  mark(times, 0);")
    lines += _compaction(program, printer)
    for number, launch in enumerate(program.launches):
        printed = [] if launch.compacts else printer.guarded(launch)
        lines += ["", *printed, f"  mark(times, {number + 1});"]
    return "\n".join([*lines, "}"]) + "\n" + (_ENTRIES if can_choose else "")


def _compaction(program: Program, printer: "_LaunchPrinter") -> Iterator[str]:
    """The whole of a step with a compaction; nothing of an engine without."""
    launches = [launch for launch in program.launches if launch.compacts]
    if launches:
        yield "  if (step->compaction != nullptr) {"
        for launch in launches:
            yield from (f"  {line}" for line in printer.lines(launch))
        yield "    return;"
        yield "  }"


class _LaunchPrinter:
    """Knows the numbers and dtypes of the operands that launches name."""

    def __init__(self, program: Program) -> None:
        self._weights = {slot.name: i for i, slot in enumerate(program.weights)}
        self._caches = {name: i for i, name in enumerate(program.cache_names())}
        self._inputs = _INPUTS | _group_inputs(len(program.policies))
        pools = () if program.adapters is None else program.adapters.names()
        self._pools = {name: i for i, name in enumerate(pools)}
        self._sides = [side.name for side in program.side_outputs]
        self._weight_dtypes = {slot.name: slot.dtype for slot in program.weights}

    def guarded(self, launch: Launch) -> Iterator[str]:
        """The call, under the condition that the step needs its result."""
        conditions = [f"step->sides & {self._mask(launch.sides)}"] if launch.sides else []
        conditions += [f"!(step->sides & {self._mask(launch.unless)})"] if launch.unless else []
        if launch.wanted:
            conditions.append(f"choices {'==' if StepOutput.LOGITS in launch.wanted else '!='} nullptr")
        if not conditions:
            yield from self.lines(launch)
            return
        yield f"  if ({' && '.join(conditions)}) {{"
        yield from (f"  {line}" for line in self.lines(launch))
        yield "  }"

    def _mask(self, names: Sequence[str]) -> str:
        return f"({' | '.join(f'{1 << self._sides.index(name)} /* {name} */' for name in names)})"

    def lines(self, launch: Launch) -> Iterator[str]:
        """The call and the comment above it."""
        for line in describe(launch.origin).splitlines():
            yield f"  // {line}"
        values = {name: self._value(name, value) for name, value in launch.arguments.items()}
        if launch.family != LOOP:
            yield f"  run({launch.kernel}, pool,"
            fields = [f".{name} = {value}" for name, value in values.items()]
            yield from wrapped(fields, "      {", "});")
        else:
            yield from wrapped(["pool", *values.values()], f"  {launch.kernel}(", ");")

    def _value(self, name: str, value: Argument) -> str:
        if isinstance(value, bool):
            return "1" if value else "0"
        if isinstance(value, float):
            return f"{value!r}f"
        if isinstance(value, Count):
            return _COUNTS[value]
        if isinstance(value, Rows):
            return f"{value.times} * {_COUNTS[value.count]}"
        if isinstance(value, str):
            return enumerator(name, value)
        if not isinstance(value, Operand):
            return str(value)
        place = self._pointer(value) + (f" + {value.offset}" if value.offset else "")
        return place if value.stride is None else f"{{{place}, {value.stride}}}"

    def _pointer(self, operand: Operand) -> str:
        if operand.space == "buffer":
            return _variable(operand.name)
        if operand.space == "weight":
            index, name = self._weights[operand.name], operand.name
            return f"({pointer(self._weight_dtypes[name], written=False)})w[{index} /* {name} */]"
        if operand.space == "engine":
            return f"engine->{operand.name}"
        if operand.space == "adapter":
            return f"engine->adapters[{self._pools[operand.name]} /* {operand.name} */]"
        if operand.space == "cache":
            return f"engine->caches[{self._caches[operand.name]}]"
        if operand.space == "state":
            return f"(float*)engine->caches[{len(self._caches) + int(operand.name)}]"
        return self._inputs.get(operand.name, f"step->{operand.name}")


def _group_inputs(groups: int) -> dict[str, str]:
    """Inputs of cache groups 1 and up, which follow those of group 0."""
    lengths = {"slot_mapping": "T", "block_tables": "R * step->max_blocks", "context_lens": "R"}
    return {
        group_input(name, group): f"step->{name} + {group} * {length}"
        for group in range(1, 1 + groups)
        for name, length in lengths.items()
    }


def _affine(offset: Affine) -> str:
    terms = [f"{offset.tokens} * T"] * bool(offset.tokens) + [f"{offset.logit_rows} * L"] * bool(offset.logit_rows)
    return " + ".join([*terms, *([str(offset.constant)] if offset.constant or not terms else [])])


def _variable(name: str) -> str:
    """A C++ name for a buffer; no keyword or function ends in an underscore."""
    return re.sub(r"\W", "_", name) + "_"
