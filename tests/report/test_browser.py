"""The page in a browser: drawn without an error, clicked through, and its arithmetic that of the compiler."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from llmc.compiler import build
from llmc.debug.profiler import Workload, profile_engine
from llmc.engine_format import EngineDirectory, read_engine
from llmc.engine_format.reader import REPORT_NAME
from llmc.formats.quantized_weight import QuantizedWeight
from llmc.formats.sparse_weight import SparseWeight
from llmc.prediction.cost_expression import evaluate_expression
from llmc.prediction.launch_cost import launch_costs
from llmc.prediction.launch_time import predict_launch
from llmc.prediction.rates import KindRates, Rates, Reach
from llmc.prediction.step_shape import StepShape
from llmc.report.contents import EngineContents, read_contents
from llmc.report.machine_code import BudgetRow, KernelBudgets
from llmc.report.measured_perplexity import MeasuredPerplexity
from llmc.report.page.page import report_page
from llmc.report.profile import Profile
from tests.quick_sample import quick_sample
from tests.tiny_models import tiny_checkpoint

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync")
KINDS = {
    "F32": KindRates(300e9),
    "BF16": KindRates(700e9, (Reach(1, 0.1), Reach(16, 0.9), Reach(64, 1.0)), 3e9, 0.3),
    "attention bf16·bf16": KindRates(200e9, (Reach(4, 0.4), Reach(64, 1.0)), None, 1.2),
    "lookup": KindRates(300e9, bandwidth=2e9),
}
RATES = Rates(40e9, KINDS, 2e-7, measured=True)
ASSETS = Path(__file__).parent.parent.parent / "llmc/report/page/assets"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def directory(draft_engine: Path) -> EngineDirectory:
    return read_engine(draft_engine)


@pytest.fixture(scope="module")
def profile(draft_engine: Path) -> Profile:
    return profile_engine(draft_engine, Workload(prefill=16, batch=2, context=20, repeats=2), threads=1)


@pytest.fixture(scope="module")
def contents(directory: EngineDirectory) -> EngineContents:
    return read_contents(directory.files, directory.manifest, directory.program)


@pytest.fixture(scope="module")
def profiled(contents: EngineContents, profile: Profile) -> str:
    """The report with a profile."""
    return report_page(contents, RATES, profile)


@pytest.fixture
def page(browser: Browser, profiled: str, tmp_path: Path) -> Iterator[Page]:
    with opened(browser, profiled, tmp_path / "report.html") as page:
        yield page


@contextmanager
def opened(browser: Browser, content: str, file: Path) -> Iterator[Page]:
    """A page, opened from disk; an error in its script fails the test."""
    file.write_text(content, encoding="utf-8")
    page, errors = browser.new_page(viewport={"width": 1400, "height": 900}), list[str]()
    requests: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: requests.append(request.url))
    page.goto(file.as_uri())
    page.wait_for_selector("html[data-ready]", state="attached", timeout=20_000)
    yield page
    assert errors == []
    assert requests == [file.as_uri()]
    page.close()


def test_missed_budgets_stand_before_met_ones(browser: Browser, contents: EngineContents, tmp_path: Path) -> None:
    rows = (
        BudgetRow("stack bytes", 0.0, "≤ 0", True, "a stack is traffic"),
        BudgetRow("barriers", 2.0, "≤ 0", False, "warps wait for each other"),
        BudgetRow("bytes in flight", None, "≥ 4000", False, "memory idles"),
    )
    budgets: KernelBudgets = {launch.kernel: {"sm_90": rows} for launch in contents.program.launches}
    with opened(browser, report_page(contents, RATES, budgets=budgets), tmp_path / "budgets.html") as page:
        page.locator("nav >> text=Kernels").first.click()
        missed = page.locator("table.budgets").first.inner_text()
        assert "barriers" in missed and "not visible" in missed and "stack bytes" not in missed
        assert "2 of 3 figures miss their budgets" in page.locator(".kernel").inner_text()


def test_passes_are_stepped_through(page: Page) -> None:
    page.locator(".bar").nth(0).click()
    assert page.locator(".pass-head h3").inner_text() == "remove_export_residue"
    names = set()
    for _ in range(30):
        names.add(page.locator(".pass-head h3").inner_text())
        page.keyboard.press("ArrowRight")
    assert {"fuse_rms_norm", "page_kv_cache", "fuse_rope_kv_write"} <= names
    page.locator('.bar[aria-label*=", fuse_rms_norm:"]').click()
    before, after = (page.locator(".side-pane").nth(i) for i in (0, 1))
    assert before.locator(".row.removed .op").first.inner_text() == "_to_copy"
    assert set(after.locator(".row.added .op").all_inner_texts()) == {"rms_norm"}
    after.locator(".row.added").first.click()
    info = page.locator(".node-info").inner_text()
    assert "fuse_rms_norm" in info
    assert "modeling_llama.py" in info
    page.locator(".tab", has_text="5 rewrites").click()
    assert "alike" in page.locator(".records").first.inner_text()


def test_identical_layers_are_drawn_once_or_one_by_one(page: Page) -> None:
    page.locator('.bar[aria-label*=", make_lm_head:"]').click()
    after = page.locator(".side-pane").nth(1)
    assert "2 × identical" in after.locator(".layer-head").first.inner_text()
    together = after.locator(".row").count()
    page.get_by_label("every layer").check()
    after = page.locator(".side-pane").nth(1)
    assert after.locator(".layer").count() == 0
    assert after.locator(".row").count() > together


def test_a_kernel_shows_its_code_and_origin(page: Page) -> None:
    page.locator('[data-kernel="rms_norm_bf16"]').click()
    kernel = page.locator(".kernel")
    assert kernel.locator("h3").inner_text() == "rms_norm_bf16"
    assert "run(llmc_rms_norm_bf16, pool," in kernel.locator("pre").first.inner_text()
    assert "modeling_llama.py" in kernel.locator(".records").first.inner_text()
    kernel.get_by_text("Its kernel").click()
    assert "LLMC_KERNEL(LlmcNorm, rms_norm_bf16," in kernel.locator("pre").nth(1).inner_text()


def test_sliders_change_costs_and_measured_steps_show_measured_times(page: Page, profile: Profile) -> None:
    row = page.locator("tr", has=page.locator('[data-kernel="paged_attention_bf16_bf16"]'))
    before = row.inner_text()
    page.get_by_label("Context, exactly").fill("7")
    page.keyboard.press("Tab")
    assert row.inner_text() != before
    assert page.locator("th", has_text="Measured").count() == 0
    page.get_by_role("button", name=profile.steps[1].name).click()
    assert page.locator("th", has_text="Measured").count() == 1
    assert "measured per launch" in page.locator(".numbers").inner_text()
    assert page.get_by_label("Batch, exactly").input_value() == "2"
    page.get_by_role("button", name="Prefill", exact=True).click()
    assert page.get_by_label("Prompt tokens, exactly").is_visible()


def test_plots_keys_and_themes(page: Page, directory: EngineDirectory) -> None:
    assert page.locator(".roofline .point").count() >= 5
    page.locator(".roofline .point").last.click()
    assert page.locator(".roofline .point.picked").count() == 1
    assert page.locator("rect.buffer").count() == len(directory.program.buffers)
    page.keyboard.press("5")
    page.wait_for_function("location.hash === '#memory'")
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.keyboard.press("t")
    assert page.evaluate(background) != light
    page.keyboard.press("?")
    assert page.locator("dialog").is_visible()
    page.get_by_role("button", name="Close").click()


def test_the_page_predicts_what_the_compiler_predicts(page: Page, directory: EngineDirectory) -> None:
    step = StepShape.decode(requests=1, context=256)
    page.get_by_label("Context, exactly").fill("256")
    page.keyboard.press("Tab")
    pairs = zip(directory.program.launches, launch_costs(directory.program), strict=True)
    seconds = sum(predict_launch(cost, step, RATES) for launch, cost in pairs if launch.runs(tokens=1, logit_rows=1))
    shown = page.locator("tr.total td").nth(2).inner_text()
    value, unit = shown.split()
    assert float(value) * {"µs": 1e-6, "ms": 1e-3}[unit] == pytest.approx(seconds, rel=1e-3)


def test_quantization_is_shown_by_layer_and_in_all(
    browser: Browser, directory: EngineDirectory, contents: EngineContents, tmp_path: Path
) -> None:
    weights = (
        QuantizedWeight("model.layers.0.mlp.up_proj", "int4-gptq", 384, 128, 4.125, 0.08, True, None),
        QuantizedWeight("model.layers.0.mlp.down_proj", "int4-gptq", 128, 384, 4.125, 0.04, True, None),
        QuantizedWeight("model.layers.1.mlp.up_proj", "int8", 384, 128, 8.25, 0.01, True, "KL 2.00e-02 at 4 bits"),
        QuantizedWeight("lm_head", "w8a8", 1024, 128, 8.25, 0.005, False, None),
    )
    cache = replace(directory.program.caches[0], dtype="U8", format="int8")
    program = replace(directory.program, caches=(cache,) * len(directory.program.caches))
    contents = replace(contents, program=program, quantized=weights)
    perplexity = MeasuredPerplexity(1, "m", ("int4-gptq",), "int8", "bfloat16", "held.txt", 1000, 256, 41.0, 40.0)
    with opened(browser, report_page(contents, RATES, None, perplexity), tmp_path / "quantized.html") as page:
        page.keyboard.press("6")
        page.wait_for_function("location.hash === '#quantization'")
        section = page.locator("#quantization")
        cards = " ".join(section.locator(".card").all_inner_texts())
        for part in ("6.79", "int4-gptq, int8, w8a8", "41.000", "1.0250 ×", "1,000 tokens of held.txt", "as int8"):
            assert part in cards, cards
        rows = section.locator(".heat tbody tr")
        assert [row.split() for row in rows.all_inner_texts()] == [
            ["0", "8.0%", "4.13", "bits", "4.0%", "4.13", "bits"],
            ["1", "1.0%", "8.25", "bits", "—"],
        ]
        section.locator(".heat-cell", has_text="1.0%").hover()
        assert "KL 2.00e-02 at 4 bits" in page.locator("#tooltip").inner_text()
        section.get_by_text("Every weight").click()
        assert section.locator("table.quantized tbody tr").count() == 4


def test_zeros_are_shown_in_all_and_of_each_weight(browser: Browser, contents: EngineContents, tmp_path: Path) -> None:
    masked = SparseWeight("layers.0.up_proj", "up", "sparsegpt:0.5", 384, 128, 0.5, 0.08, True, 9.0, 16.0)
    weights = (masked, SparseWeight("layers.0.down_proj", "down", "as stored", 128, 384, 0.2, reason="no masks here"))
    with opened(browser, report_page(replace(contents, sparse=weights), RATES), tmp_path / "sparse.html") as page:
        section = page.locator("#sparsity")
        cards = " ".join(section.locator(".card").all_inner_texts())
        for part in ("35.0%", "9.00 bits per weight", "1.78 ×", "1\nweights keep their zeros"):
            assert part in cards, cards
        rows = [row.split("\t") for row in section.locator("tbody tr").all_inner_texts()]
        assert rows[0] == ["layers.0.up_proj", "sparsegpt:0.5", "50.0%", "9.00", "1.78 ×", "8.0%", ""]
        assert rows[1] == ["layers.0.down_proj", "as stored", "20.0%", "dense", "", "as stored", "no masks here"]


def test_what_there_is_nothing_to_say_of_has_no_section(page: Page) -> None:
    assert page.locator("#sparsity").count() == 0
    assert page.locator("#quantization").count() == 0


def test_quality_is_shown_of_an_engine_without_codes(
    browser: Browser, contents: EngineContents, tmp_path: Path
) -> None:
    perplexity = MeasuredPerplexity(1, "m", (), "auto", "bfloat16", "held.txt", 1000, 256, 41.0, 40.0)
    with opened(browser, report_page(contents, RATES, None, perplexity), tmp_path / "plain.html") as page:
        assert page.locator("#quantization h2").inner_text() == "Quality"
        assert "1.0250 ×" in " ".join(page.locator("#quantization .card").all_inner_texts())


# How many points of the roofs, a pixel apart, lie within a label: in the label's own frame, which may be turned.
CROSSINGS = """() => {
  const inside = (label, roof) => {
    const box = label.getBBox(), frame = label.getCTM().inverse().multiply(roof.getCTM());
    let found = 0;
    for (let at = 0; at <= roof.getTotalLength(); at += 1) {
      const point = roof.getPointAtLength(at).matrixTransform(frame);
      if (point.x > box.x && point.x < box.x + box.width && point.y > box.y && point.y < box.y + box.height) found += 1;
    }
    return found;
  };
  const labels = [...document.querySelectorAll(".roof-label")], roofs = [...document.querySelectorAll(".roof")];
  return labels.flatMap((label) => roofs.map((roof) => inside(label, roof)));
}"""


@pytest.mark.parametrize(
    ("bf16", "attention", "bandwidth"),
    [
        (460e9, 290e9, 9.14e9),  # There is room over attention's roof, but the slope runs through it.
        *quick_sample(
            [(bf16, 200e9, bandwidth) for bf16 in (310e9, 420e9, 700e9) for bandwidth in (4e9, 40e9, 200e9)],
            [(420e9, 200e9, 40e9)],
        ),
    ],
)
def test_no_line_crosses_a_label_of_the_roofline(
    browser: Browser, contents: EngineContents, tmp_path: Path, bf16: float, attention: float, bandwidth: float
) -> None:
    kinds = KINDS | {"F32": KindRates(127e9), "BF16": KindRates(bf16), "attention bf16·bf16": KindRates(attention)}
    rates = Rates(bandwidth, kinds, 2e-7, measured=True)
    with opened(browser, report_page(contents, rates), tmp_path / "roofs.html") as page:
        crossings = page.evaluate(CROSSINGS)
    assert len(crossings) >= 6 and not any(crossings)


# Pairs of a kernel's name and a point, or another name, that lie on each other.
COVERED = """() => {
  const names = [...document.querySelectorAll(".point-label")], boxes = names.map((name) => name.getBBox());
  const points = [...document.querySelectorAll(".roofline .point")].map((point) => point.getBBox());
  const on = (a, b) => a.x < b.x + b.width && b.x < a.x + a.width && a.y < b.y + b.height && b.y < a.y + a.height;
  // A circle leaves a fifth of its box free; what reaches into the box alone does not count.
  const inner = ({ x, y, width: w, height: h }) => ({ x: x + w / 8, y: y + h / 8, width: w * 0.75, height: h * 0.75 });
  return { names: names.length, covered: boxes.flatMap((box, i) =>
    [...points.map(inner), ...boxes.slice(0, i)].filter((other) => on(box, other))).length };
}"""


@pytest.mark.parametrize("bandwidth", quick_sample([8e9, 40e9, 200e9], [8e9]))
def test_the_names_of_kernels_can_be_read(
    browser: Browser, contents: EngineContents, tmp_path: Path, bandwidth: float
) -> None:
    rates = Rates(bandwidth, KINDS, 2e-7, measured=True)
    with opened(browser, report_page(contents, rates), tmp_path / "names.html") as page:
        overlaps = page.evaluate(COVERED)
        crossings = page.evaluate(CROSSINGS.replace('".roof-label"', '".point-label"'))
    assert overlaps["names"] >= 3 and overlaps["covered"] == 0 and not any(crossings)


EXPRESSIONS = (
    "12",
    "8*R + 2048*C + 4",
    "-3*T + 10",
    "Min(A, 128*T)*256 + 2*(T + L)",
    "1.5e3*T*R*L - C",
    "Min(C, 16*R, 7)",
)
WRONG = ("", "T T", "2**T", "alert(1)", "Q + 1", "Min(T", "T + ", "constructor", "1 / T", "T.x", "(T")


@pytest.mark.slow
def test_expressions_mean_in_the_page_what_they_mean_to_the_compiler(page: Page, directory: EngineDirectory) -> None:
    source = (ASSETS / "expression.js").read_text(encoding="utf-8").replace("export ", "")
    values = {"T": 3, "L": 2, "R": 2, "C": 40, "A": 77}

    def in_page(text: str) -> Any:
        call = (
            f"try {{ return expression({json.dumps(text)})({json.dumps(values)}); }} catch (error) {{ return null; }}"
        )
        return page.evaluate(f"() => {{ {source}\n{call} }}")

    used = {text for launch in directory.program.launches for text in (launch.bytes_moved, launch.flops)}
    for text in (*EXPRESSIONS, *sorted(used)):
        assert in_page(text) == pytest.approx(evaluate_expression(text, values)), text
    for text in WRONG:
        assert in_page(text) is None, text


@pytest.mark.slow
def test_32_layers_open(browser: Browser, tmp_path: Path) -> None:
    model = tiny_checkpoint("llama", tmp_path / "model", num_hidden_layers=32)
    build(model, tmp_path / "deep.llmc")
    content = (tmp_path / "deep.llmc" / REPORT_NAME).read_text(encoding="utf-8")
    assert len(content.encode()) < 10e6
    with opened(browser, content, tmp_path / "report.html"):
        pass
