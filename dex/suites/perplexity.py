"""The loss on held-out text: that of a recipe's run, or of any text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import model_validator

from dex.recipe import Data, data_block, load_recipe
from dex.settings import Problem, clash, number, text, whole
from dex.suites.base import Outcome, Suite

if TYPE_CHECKING:
    from dex.evaluation.answers import Answers
    from dex.evaluation.evaluated import Evaluated

OF_A_RECIPE = ("data", "block", "held_out", "tokens", "per_document")


class Perplexity(Suite):
    what: ClassVar[str] = "which measures the loss on held-out text"
    which_items: ClassVar[tuple[str, ...]] = ("recipe", *OF_A_RECIPE)

    name: Literal["perplexity"] = "perplexity"
    recipe: Annotated[str | None, text(null=True)] = None  # a recipe, whose held-out part it is
    data: Annotated[str, text()] = "pydoc"  # or text: a file, a folder, a Hub data set, pydoc or stdlib
    block: Annotated[int, whole(above=1)] = 256
    held_out: Annotated[float, number(above=0, below=1)] = 0.1  # share of the documents
    tokens: Annotated[int | None, whole(above=0, null=True)] = None  # at most so many
    per_document: Annotated[int | None, whole(above=1, null=True)] = None  # and at most so many of each

    @model_validator(mode="after")
    def _of_one_kind(self) -> Perplexity:
        idle = [key for key in OF_A_RECIPE if key in self.model_fields_set]
        if self.recipe is not None and idle:
            raise clash([Problem((idle[0],), f"{idle[0]} has no effect beside recipe; leave one of them out")])
        return self

    def check(self) -> None:
        self._data()

    def inputs(self) -> dict[str, Any]:
        from dex.data.sources import identity, is_local
        from dex.run_data import sources

        data, tokens_of_run, template = self._data()
        local = {source.source: identity(source) for source in sources(data) if is_local(source)}
        written = Path(template).read_text(encoding="utf-8") if template else None
        return {"data": [data.model_dump(mode="json"), tokens_of_run, written, local]}

    def run(self, evaluated: Evaluated, answers: Answers) -> Outcome:
        from dex.evaluation.answers import answer_all
        from dex.evaluation.held_out import (
            BlockLoss,
            batches_of_one_length,
            check_context,
            held_out_result,
            losses_of_batch,
        )
        from dex.evaluation.records import prompt_hash
        from dex.models import use_chat_template
        from dex.run_data import held_out_blocks, prepare_data

        data, tokens_of_run, template = self._data()
        if template is not None:
            use_chat_template(evaluated.tokenizer, Path(template))
        prepared = prepare_data(data, evaluated.tokenizer, tokens_of_run)
        blocks = held_out_blocks(data, prepared)
        lengths = [len(block.input_ids) for block in blocks]
        check_context(blocks, evaluated.context, evaluated.label)
        found = answer_all(
            [
                f"{i}-{prompt_hash(block.input_ids.tolist(), block.targets.long().tolist())}"
                for i, block in enumerate(blocks)
            ],
            list(batches_of_one_length(lengths, evaluated.batch_size)),
            lambda batch: [loss.loss for loss in losses_of_batch(evaluated.model, [blocks[i] for i in batch])],
            answers,
            evaluated.label,
            lengths,
            "tokens",
        )
        losses = [
            BlockLoss(block.document, int(block.targets.sum()), loss)
            for block, loss in zip(blocks, found, strict=True)
        ]
        made = held_out_result(evaluated.label, evaluated.identity, losses, blocks, prepared.held_out)
        return Outcome(made.tasks, made.records, made.figures, made.settings)

    def _data(self) -> tuple[Data, int, str | None]:
        """The data block, the budget that its held-out part belongs to, and the chat template.

        How far a Hub data set was read depends on the budget.
        """
        if self.recipe is not None:
            loaded = load_recipe(self.recipe)
            return loaded.data, loaded.run.tokens, loaded.model.chat_template
        settings = {"held_out_tokens": self.tokens, "held_out_per_document": self.per_document}
        block = data_block(train=[{"source": self.data}], block=self.block, held_out=self.held_out, **settings)
        return block, 1, None
