"""How budgets were steered: the multiplier of old rows, and how much their loss has risen, over time."""

from holdfast.report.drawing.chart import Chart, Line, Panel
from holdfast.report.pictures.axis import token_axis
from holdfast.report.run_files import Run


def picture(run: Run) -> Chart | None:
    """For each budget the multiplier and the measured difference on control rows, over tokens."""
    records = [record for record in run.kind("train") if record.get("keep")]
    names = list(dict.fromkeys(name for record in records for name in record["keep"]))
    if not names:
        return None
    panels, multipliers = [], []
    limits = {each["name"]: float(each["limit"]) for each in run.results.get("keep", {}).get("budgets", ())}
    for name in names:
        known = [(float(record["tokens"]), record["keep"][name]) for record in records if name in record["keep"]]
        x = [tokens for tokens, _ in known]
        multipliers.append(Line(name, x, [each["multiplier"] for _, each in known], run.color(name)))
        measured = [(tokens, each["difference"]) for tokens, each in known if each["difference"] is not None]
        lines = [Line(name, [tokens for tokens, _ in measured], [rise for _, rise in measured], run.color(name))]
        panels.append(Panel(f"{name}: rise on control rows, bits per byte", lines, 130, level=limits.get(name, 0)))
    return Chart(
        "keep",
        "Budgets",
        "The weight of old rows beside new ones, and the mean rise of the loss on control rows, which are not trained "
        "on; the horizontal line is the budget.",
        f"Multiplier and measured rise over tokens for {len(names)} budgets.",
        [Panel("multiplier of old rows", multipliers, 130, zero=True), *panels],
        **token_axis(run),
    )
