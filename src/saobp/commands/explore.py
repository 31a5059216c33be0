"""``saobp explore``: the attention of a local model on typed sentences."""

from __future__ import annotations

import webbrowser
from typing import Annotated

import typer

from saobp.commands.import_option import Imports, import_user_code
from saobp.commands.streams import fail, print_note, print_result
from saobp.extras import MissingPackageError
from saobp.storage.model_folders import checked_folder


def explore(
    model: Annotated[
        str | None, typer.Argument(help="Folder of a run or of a saved model, or a name on the hub.")
    ] = None,
    refinement: Annotated[
        str | None, typer.Option(help="Refine the model first, as in high:0.2; none takes its own off.")
    ] = None,
    length: Annotated[int, typer.Option(help="Cut sentences to so many tokens.", min=2, max=512)] = 64,
    port: Annotated[
        int, typer.Option(help="Port on this machine; 0 takes a free one.", min=0, max=65535)
    ] = 0,
    example: Annotated[
        bool, typer.Option("--example", help="Use a synthetic model, whose heads have known patterns.")
    ] = False,
    browser: Annotated[bool, typer.Option(help="Open the page in the browser.")] = True,
    imports: Imports = None,
) -> None:
    """Serve the explorer on this machine, for sentences typed in, until Ctrl-C."""
    try:
        if model is not None:
            checked_folder(model)
        elif not example:
            raise ValueError("name a model: saobp explore FOLDER, or saobp explore --example")
        import_user_code(imports)
        from saobp.commands.refinement_option import parse_refinement_option
        from saobp.metrics.diagnosis.loading import EXAMPLE, load_model
        from saobp.metrics.diagnosis.text_batches import CHARACTERS_PER_TOKEN
        from saobp.report.explorer import explorer_data
        from saobp.report.server import make_server

        name = EXAMPLE if model is None else model
        loaded, tokenizer = load_model(name, parse_refinement_option(refinement) if refinement else None)
        subject = name if refinement is None else f"{name} with {refinement}"
        server = make_server(
            lambda text: explorer_data(loaded, tokenizer, [text], max_tokens=length, subject=subject),
            subject=subject,
            characters=CHARACTERS_PER_TOKEN * length,
            tokens=length,
            port=port,
        )
    except (ValueError, OSError, MissingPackageError) as problem:
        fail(problem)
    address = f"http://127.0.0.1:{server.server_address[1]}/"
    with server:
        try:
            print_result(f"{subject}: {address} (this machine only; Ctrl-C ends it)")
            if browser:
                webbrowser.open(address)
            server.serve_forever()
        except KeyboardInterrupt:
            print_note("ended")
