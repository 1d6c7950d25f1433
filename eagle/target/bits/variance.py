"""Whether a target gives a token the same bits, whatever is read together with it."""

# T prompt tokens, N nodes of a tree, V vocabulary, D width

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eagle.core.tree import DraftTree
from eagle.target.state import TargetState
from eagle.target.structure import FAILURES, describe_failure

PROMPT = 40  # tokens: enough keys for sums whose order matters
PARENTS = [-1, 0, 0, 0, 1, 1, 2, 2, 4, 4, 5, 6, 7, 8, 8, 9, 10]  # of a tree of 17 nodes
PATH = [0, 1, 4, 8, 14]  # of nodes, from its root to a leaf


@torch.inference_mode()
def find_variance(target: Any, length: int = PROMPT) -> str | None:
    """Return in words what changes the bits of a token's logits after a prompt of `length` tokens; None for nothing.

    The reference is a prompt that is read whole, followed by steps by one token. The same states and logits must come
    from the prompt in chunks, from a tree, and from a batch.
    """
    # a model with few positions gets a shorter prompt
    max_tokens = target.max_positions or length + len(PARENTS)
    count = min(length, max_tokens - len(PARENTS))
    size = target.model.get_input_embeddings().weight.shape[0]
    order = torch.randperm(max(size, count), generator=torch.Generator().manual_seed(1))
    # arbitrary tokens, for the prompt and for the tree
    prompt = (order[:count] % size).tolist()
    tree = DraftTree(torch.arange(3, 3 + len(PARENTS)) * 5 % size, torch.tensor(PARENTS))
    trials = {
        "a prompt is read in chunks": lambda: _read_steps(target, prompt, tree, chunk=count // 3),
        "a tree is read": lambda: _read_tree(target, [prompt], tree),
        # the first prompt is shorter, so that its row is padded; the states compared are those of the last one
        "a batch is read": lambda: _read_tree(target, [prompt[: count // 4], prompt], tree),
    }
    # states and logits at five nodes
    expected = _read_steps(target, prompt, tree, chunk=count)
    for name, read in trials.items():
        try:
            got = read()
        # no property of the target, although it is a RuntimeError
        except torch.OutOfMemoryError:
            raise
        except FAILURES as error:
            return f"{name} fails ({describe_failure(error)})"
        if not all(map(torch.equal, got, expected)):
            return f"a token's bits change when {name}"
    return None


def _read_steps(
    target: Any,
    prompt: list[int],
    tree: DraftTree,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Return states [5, D] and logits [5, V] at the nodes PATH of a tree, read as a sequence in steps by one token.

    D is the states' width, and V the vocabulary. The prompt is read before in chunks of `chunk` tokens. It is the
    reference for reading the same tokens at once.
    """
    # tap -1: the states that enter the LM head
    state = TargetState(target, taps=(-1,))
    # row 0 is the only sequence; the tree's nodes are more than the steps
    state.admit(0, prompt, room=len(tree))
    state.finish_prompts(chunk)
    states: list[Tensor] = []
    logits: list[Tensor] = []
    for token in tree.tokens[PATH].tolist():
        output = state.read({0: DraftTree.chain([token])})[0]
        assert output.features is not None
        states.append(output.features[:, 0])  # of [1 node, 1 tap, D]
        logits.append(output.logits)
        state.keep({0: [0]})  # commits the node as the sequence's next token
    return torch.cat(states), torch.cat(logits)


def _read_tree(target: Any, prompts: list[list[int]], tree: DraftTree) -> tuple[Tensor, Tensor]:
    """Return states [5, D] and logits [5, V] at the nodes PATH of a tree, read in one forward after the last prompt.

    They are compared with those of steps by one token.

    Args:
        target: the target.
        prompts: one, or several to read as rows of a batch: the others, with the same tree after each, are there to see
            whether a batch changes the bits.
        tree: the tree, of which PATH names five nodes from the root to a leaf.
    """
    # tap -1: the states that enter the LM head
    state = TargetState(target, taps=(-1,))
    for row, prompt in enumerate(prompts):
        state.admit(row, prompt, room=len(tree))
    state.finish_prompts()
    output = state.read(dict.fromkeys(range(len(prompts)), tree))[len(prompts) - 1]
    assert output.features is not None
    # features are [nodes, taps, D], of the one tap
    return output.features[PATH, 0], output.logits[PATH]
