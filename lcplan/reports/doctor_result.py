"""Findings for the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from lcplan.doctor import DoctorReport, Finding

STYLES = {"red": "bold red", "yellow": "yellow", "green": "green"}


def print_doctor(report: DoctorReport) -> None:
    """Every finding with its fix, worst first, and the answer."""
    console = Console()
    print_findings(console, report.findings)
    count = sum(finding.level == "red" for finding in report.findings)
    answer = "Nothing is in the way." if report.passed else f"{count} in the way; run would refuse without --force."
    console.print(answer, highlight=False)


def print_findings(console: Console, findings: tuple[Finding, ...]) -> None:
    """One paragraph each."""
    for finding in findings:
        line = Text.assemble((f"{finding.level:<6} ", STYLES[finding.level]), (f"[{finding.code}] ", "dim"))
        line.append(finding.message)
        if finding.fix:
            line.append(f" {finding.fix}")
        console.print(line, soft_wrap=True)
