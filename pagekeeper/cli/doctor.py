"""`pagekeeper doctor`: what this machine can run, and what to do about the rest."""

import json
from dataclasses import asdict
from typing import Annotated

import typer


def doctor(as_json: Annotated[bool, typer.Option("--json", help="JSON and nothing else.")] = False) -> None:
    """Say what this machine can run, and why not the rest; exit 1 if it can serve nowhere."""
    from pagekeeper.cli.diagnosis import examine
    from pagekeeper.cli.machine import look_around

    diagnosis = examine(look_around())
    if as_json:
        print(json.dumps(asdict(diagnosis), indent=2))
    else:
        for finding in (*diagnosis.findings, *diagnosis.conclusions):
            remedy = f"; {finding.remedy}" if finding.remedy else ""
            print(f"{'can' if finding.can else 'cannot':8}{finding.what:18}{finding.found}{remedy}")
    if not any(conclusion.can for conclusion in diagnosis.conclusions):
        raise typer.Exit(1)
