"""Generate the training answers, if the recipe asks for them. Then show which tokens contribute to the loss."""

from __future__ import annotations

from data_prep import inspect_mask, regenerate
from eagle.data.features import world
from eagle.log import script
from eagle.recipe import Recipe
from eagle.recipe.command_lines import ProgramOption, command_line

STEPS = ("answers", "masks", "overlap", "draft-vocab", "tokens")


def main(argv: list[str]) -> None:
    """Regenerate the answers if the recipe has that section; show masks and counts."""
    parser = command_line("eagle prepare", __doc__)
    parser.add_argument("--count", default="3", help="number of conversations to show")
    parser.add_argument("--html", metavar="PATH", help="also write them to an HTML page")
    parser.add_argument(
        "--without-failed", action="store_true", help="finish without the conversations that failed"
    )
    # for which `eagle` runs the program of that step
    parser.add_argument(
        "--only",
        action=ProgramOption,
        choices=STEPS,
        help="run only one step; for its options, see `eagle help prepare --only STEP`",
    )
    args = parser.parse_intermixed_args(argv)
    recipe = [args.recipe, *args.overrides]
    warning = ""
    if Recipe.load(args.recipe, args.overrides).regenerate is not None:
        words = list(recipe)
        if args.without_failed:
            words.append("--without-failed")
        warning = regenerate.run(words)
    # Of several processes one shows the masks.
    if world()[0] == 0:
        words = [*recipe, "--count", args.count]
        if args.html:
            words += ["--html", args.html]
        inspect_mask.main(words)
        # after screens of examples, so that it is seen
        if warning:
            print(warning)


if __name__ == "__main__":
    script(main)
