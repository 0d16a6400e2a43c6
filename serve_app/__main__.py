"""`python -m serve_app`: check a config, make keys, start a server."""

import argparse
import re
import sys
from pathlib import Path

from serve_app.auth import TENANT_NAME, digest_of, new_key
from serve_app.check import problems
from serve_app.launch import run


def main(arguments: list[str] | None = None) -> int:
    """Run one subcommand; the exit status is 0 for success, 1 for problems found, 2 for wrong usage."""
    parser = argparse.ArgumentParser(prog="python -m serve_app", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    check = commands.add_parser("check", help="report everything wrong with a Serve config, unknown keys included")
    check.add_argument("config", type=Path)

    keys = commands.add_parser("keys", help="API keys").add_subparsers(dest="keys_command", required=True)
    new = keys.add_parser("new", help="make a key for a tenant and print the line for the tenants file")
    new.add_argument("tenant")

    start = commands.add_parser("run", help="check a Serve config, start `serve run`, say when it is ready")
    start.add_argument("config", type=Path)

    options = parser.parse_args(arguments)
    if options.command == "check":
        return _check(options.config)
    if options.command == "keys":
        return _new_key(options.tenant)
    return run(options.config)


def _check(config: Path) -> int:
    found = problems(config)
    print("\n".join(found) if found else f"{config}: no problems found")
    return 1 if found else 0


def _new_key(tenant: str) -> int:
    if not re.fullmatch(TENANT_NAME, tenant):
        print(f"{tenant!r} is no tenant name: letters, digits, '.', '_' and '-', at most 63", file=sys.stderr)
        return 2
    key = new_key()
    print(f"key, shown once, for {tenant}:\n  {key}\n")
    print("For a tenant that the tenants file has already, add this line under its keys_sha256:")
    print(f"      - {digest_of(key)}\n")
    print("For a new tenant, add (revisions are globs on what it may use):")
    print(f'  "{tenant}":\n    keys_sha256:\n      - {digest_of(key)}\n    revisions: ["minilm@*"]')
    return 0


if __name__ == "__main__":
    sys.exit(main())
