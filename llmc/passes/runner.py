"""Runs passes over a graph: matching, replacement, dead code, verification, timing and numbering happen only here."""

import time
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.fx.proxy import GraphAppendingTracer

from llmc.errors import LlmcError, OptionError, PassError, did_you_mean
from llmc.graph.call_arguments import put_in_order
from llmc.graph.dead_code import remove_dead_code
from llmc.graph.fake_value import describe
from llmc.graph.model_graph import ModelGraph
from llmc.graph.pass_record import PassRecord, RewriteRecord
from llmc.graph.refusal import Refusal
from llmc.graph.stage import Stage
from llmc.graph.verify import verify
from llmc.options import BuildOptions
from llmc.passes.match import Match, find_match
from llmc.passes.model_data import ModelData
from llmc.passes.pattern import parameters, trace_pattern
from llmc.passes.recorded_graph import recorded_copy
from llmc.passes.rewrite import GraphPass, Pass, Rewrite, WeightPass
from llmc.passes.rewrite_log import PipelineCut, RewriteLog
from llmc.passes.seen_graph import SeenGraph
from llmc.passes.shape_check import ShapeCheck
from llmc.passes.shapes import same_value

# A pattern pass whose output matches its own pattern would never end; no pass nests deeper than this.
_MAX_ROUNDS = 64

Observer = Callable[[PassRecord, ModelGraph], None]
RewriteObserver = Callable[[str, RewriteRecord, ModelGraph], None]


@dataclass(frozen=True)
class PipelineResult:
    """The result of a pipeline. graph: what the passes made of the input, which is unchanged. was_cut: rewrites were
    left out by options.stop_after."""

    graph: ModelGraph
    records: tuple[PassRecord, ...]
    was_cut: bool


def run_pipeline(
    graph: ModelGraph,
    passes: Sequence[Pass],
    options: BuildOptions,
    observer: Observer | None = None,
    data: ModelData | None = None,
    *,
    before_rewrite: RewriteObserver | None = None,
    essential: Collection[str] = (),
) -> PipelineResult:
    """Run passes in order on a copy of the graph.

    observer: called after each pass with its record and the graph, which it must not change. before_rewrite: likewise
    before each single rewrite, with its pass's name, its record and the graph without it, which runs (dead code may
    still be in it). Cut by options.stop_after, the graph is legal for the stage before or after the interrupted pass.
    With options.finish_cut the cut does not end the pipeline: passes whose names are in `essential` run without a cut,
    the others make no further rewrites. data: for passes that read weights, which are skipped without it. Raises
    OptionError for an object that is not a pass, and for an unknown name in options.disable_passes; PassError if a pass
    fails, breaks the graph or misses a contract.
    """
    check_passes(passes, options)
    result, nodes = recorded_copy(graph)

    def announce(name: str, record: RewriteRecord) -> None:
        if before_rewrite is not None:
            before_rewrite(name, record, result)

    shapes, seen = ShapeCheck(nodes), SeenGraph()
    log = RewriteLog(nodes, options.stop_after, announce)
    records: list[PassRecord] = []
    was_cut = False
    for pass_ in passes:
        if pass_.name in options.disable_passes:
            continue
        started, size, stage = time.perf_counter(), len(nodes.nodes), result.stage
        is_whole = options.finish_cut and pass_.name in essential
        log.begin_pass(pass_.name, may_cut=not is_whole, is_added=not _is_own(pass_))
        is_partial = False
        try:
            _run_pass(pass_, result, options, log, data)
        except PipelineCut:
            was_cut = is_partial = True
        except PassError as error:
            raise _of_pass(pass_, error, options) from error
        # A graph with only some of a pass's rewrites continues as the pass's result, if the pipeline continues.
        if not is_partial or (options.finish_cut and log.rewrites()):
            result.stage = pass_.stage or stage
        if is_partial or not seen.is_this(result):
            _check_result(pass_, result, shapes, options, (pass_.stage or stage, stage) if is_partial else ())
            seen.see(result)
        records.append(_record(pass_, result, log, time.perf_counter() - started, size))
        if observer is not None:
            observer(records[-1], result)
        if was_cut and not options.finish_cut:
            break
    return PipelineResult(result.copy(), tuple(records), was_cut)


def _check_result(
    graph_pass: Pass, result: ModelGraph, shapes: ShapeCheck, options: BuildOptions, also: tuple[Stage, ...]
) -> None:
    """Clean up after a pass, and raise PassError if it broke the graph. also: further stages that are legal."""
    remove_dead_code(result)
    for node in result.graph.nodes:
        put_in_order(node)
    try:
        verify(result, also=also, allow_fallback=options.allow_fallback)
        if isinstance(graph_pass, Rewrite):
            shapes.follow()
        else:
            shapes.check()
    except PassError as error:
        raise _of_pass(graph_pass, error, options) from error


def _record(graph_pass: Pass, result: ModelGraph, log: RewriteLog, seconds: float, size: int) -> PassRecord:
    """Return the record of a pass that ran. size: number of nodes of the graph before the pass."""
    budget = None if isinstance(graph_pass, Rewrite) else graph_pass.budget
    rewrites, refusals, after = log.rewrites(), log.refusals(), len(result.graph.nodes)
    return PassRecord(
        graph_pass.name, graph_pass.numerics.value, result.stage, rewrites, refusals, seconds, size, after, budget
    )


def _is_own(graph_pass: Pass) -> bool:
    """Whether a pass comes with llmc."""
    function = graph_pass.replacement if isinstance(graph_pass, Rewrite) else graph_pass.run
    return str(getattr(function, "__module__", "")).startswith("llmc.")


def _of_pass(graph_pass: Pass, error: PassError, options: BuildOptions) -> PassError:
    fix = error.fix
    if options.disable_passes:
        hint = f"it may need a pass that was disabled: {', '.join(options.disable_passes)}"
        fix = hint if fix is None else f"{hint}; otherwise {fix}"
    return PassError(f"pass {graph_pass.name}: {error.problem}", at=error.at, fix=fix)


def check_passes(passes: Sequence[Pass], options: BuildOptions) -> None:
    """Raise OptionError for an object that is not a pass, and for a name in options.disable_passes that no pass has."""
    for index, pass_ in enumerate(passes):
        if not isinstance(pass_, Pass):
            raise OptionError(
                f"a pass must be a Rewrite, a GraphPass or a WeightPass, not {pass_!r} ({type(pass_).__name__})",
                at=f"passes[{index}]",
                fix="add your own to the default ones: passes=[*llmc.passes.default(), my_pass]",
            )
    known = sorted({p.name for p in passes})
    for name in options.disable_passes:
        if name not in known:
            raise OptionError(
                f"there is no pass {name!r} to disable",
                at=f"disable_passes={options.disable_passes!r}",
                fix=did_you_mean(name, known).rstrip() or f"passes: {', '.join(known)}",
            )


def _run_pass(
    graph_pass: Pass, graph: ModelGraph, options: BuildOptions, log: RewriteLog, data: ModelData | None
) -> None:
    try:
        _apply(graph_pass, graph, options, log, data)
    except (LlmcError, MemoryError):
        raise
    except Exception as error:  # A pass may be the user's own code, which may raise anything.
        raise PassError(
            f"{type(error).__name__}: {error}",
            at=_raised_at(error),
            fix="LLMC_DEBUG=1 shows the traceback; find the rewrite: llmc bisect MODEL",
        ) from error


def _raised_at(error: Exception) -> str:
    """The innermost line that is not torch's."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "/torch/" not in f.filename] or list(frames)
    return f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}"


def _apply(graph_pass: Pass, graph: ModelGraph, options: BuildOptions, log: RewriteLog, data: ModelData | None) -> None:
    if isinstance(graph_pass, GraphPass):
        graph_pass.run(graph, options, log)
        return
    if isinstance(graph_pass, WeightPass):
        if data is not None:
            graph_pass.run(graph, options, log, data)
        return
    roots = tuple(dict.fromkeys(target for p in graph_pass.patterns for target in trace_pattern(p).targets))
    for _ in range(_MAX_ROUNDS):
        log.drop_refusals()
        if not _round(graph_pass, roots, graph, log):
            return
        remove_dead_code(graph)
    raise PassError(
        f"still finds candidates after {_MAX_ROUNDS} rounds", fix="its replacement must not match its own patterns"
    )


def _round(rewrite: Rewrite, roots: tuple[Any, ...], graph: ModelGraph, log: RewriteLog) -> bool:
    """Examine every candidate once, in graph order; return whether anything was rewritten."""
    candidates = sorted(n for target in roots for n in graph.graph.find_nodes(op="call_function", target=target))
    changed = False
    for root in candidates:
        if not root.users:
            continue
        match = find_match(
            rewrite.patterns, root, graph, rewrite.precondition, rewrite.shares_interior, rewrite.applies
        )
        if isinstance(match, Refusal):
            log.refuse(match)
        elif match is not None:
            names = [n.name for n in match.nodes]
            log.step(f"{' + '.join(names[:6])}{' + …' if len(names) > 6 else ''}", *match.nodes)
            replace(match, rewrite.replacement)
            changed = True
    return changed


def replace(match: Match, replacement: Callable[..., Any]) -> None:
    """Insert the replacement's ops at the match, redirect the outputs' users to them, and erase unused nodes.

    Raises PassError if an output's dtype or shape would change.
    """
    graph = match.graph.graph
    tracer = GraphAppendingTracer(graph)
    values = {**match.bound, "match": match}
    arguments = {name: _proxy(values.get(name), tracer) for name in parameters(replacement)}
    with graph.inserting_before(match.place):
        outputs = replacement(**arguments)
    results = outputs if isinstance(outputs, tuple) else (outputs,)
    if len(results) != len(match.outputs):
        raise PassError(f"the replacement returned {len(results)} results for {len(match.outputs)}", at=match.root.name)
    for output, result in zip(match.outputs, results, strict=True):
        node = result.node if isinstance(result, fx.Proxy) else result
        if not isinstance(node, fx.Node):
            raise PassError(f"the replacement returned {node!r}, not a node", at=output.name)
        old, new = output.meta["val"], node.meta["val"]
        if not same_value(old, new):
            raise PassError(f"the replacement of {describe(old)} is {describe(new)}", at=output.name)
        output.replace_all_uses_with(node)
    for node in sorted(match.nodes, reverse=True):
        if not node.users:
            graph.erase_node(node)


def _proxy(value: Any, tracer: GraphAppendingTracer) -> Any:
    if isinstance(value, fx.Node):
        return fx.Proxy(value, tracer)
    if isinstance(value, list | tuple):
        return [_proxy(v, tracer) for v in value]
    return value
