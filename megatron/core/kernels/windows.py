"""Windows of consecutive tokens, which attention joins to one key or chooses together.

Legend: s sequence, b micro batch, m tokens of a window, w number of windows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Windows:
    """Windows of m tokens that follow each other from the first token of each document.

    Attributes:
        size: m.
        begins: int64 [1 or b, w], positions of their first tokens, ascending. After the windows of
            a sample, the number of tokens of the sample.
        follows: bool [1 or b, w], whether another window of the document precedes.
        ids: [b, s], the documents; None is one document.
    """

    size: int
    begins: Tensor
    follows: Tensor
    ids: Tensor | None

    @staticmethod
    def of(
        total: int, size: int, ids: Tensor | None, device: torch.device, has_parts: bool = False
    ) -> Windows:
        """Return the windows of samples of `total` tokens; w is at most total / size.

        Args:
            has_parts: the last tokens of a document are a window too if they are fewer than m; w
                is at most `total`.
        """
        count = total // size
        if ids is None:
            count += has_parts and total % size > 0
            begins = torch.arange(count, device=device).unsqueeze(0) * size
            return Windows(size, begins, begins > 0, None)
        ids = ids.contiguous()
        places = torch.arange(total, device=device)
        in_document = places - torch.searchsorted(ids, ids)
        is_first = in_document % size == 0
        if has_parts:
            count = total
        else:
            is_whole = ids == ids[:, (places + size - 1).clamp(max=total - 1)]
            is_first = is_first & is_whole & (places + size <= total)
        order = torch.sort((~is_first).byte(), stable=True).indices[:, :count]
        is_window = is_first.gather(1, order)
        follows = is_window & (in_document.gather(1, order) > 0)
        return Windows(size, torch.where(is_window, order, total), follows, ids)

    def tokens(self, x: Tensor) -> Tensor:
        """Return the tokens [w, m, b, c] of the windows of x [s, b, c]."""
        count = self.begins.shape[1]
        if self.ids is None:
            return x[: count * self.size].unflatten(0, (count, self.size))
        steps = torch.arange(self.size, device=x.device)
        places = (self.begins.unsqueeze(-1) + steps).clamp(max=len(x) - 1)
        samples = torch.arange(x.shape[1], device=x.device)
        return x[places.permute(1, 2, 0), samples]

    def hidden(self, begin: int, end: int, count: int) -> Tensor:
        """Return bool [1 or b, q, count], True where one of the first windows is of another
        document than a query, or has a token after it.

        Args:
            begin, end: positions of the queries.
        """
        begins = self.begins[:, None, :count]
        query = torch.arange(begin, end, device=begins.device).view(1, -1, 1)
        hidden = begins + self.size > query + 1
        if self.ids is not None:
            own = self.ids.gather(1, self.begins[:, :count].clamp(max=self.ids.shape[1] - 1))
            hidden = hidden | (own[:, None] != self.ids[:, begin:end, None])
        return hidden

    def in_windows(self, of_windows: Tensor, num_tokens: int) -> Tensor:
        """Return bool [b, ..., num_tokens], the value of each token's window; False for tokens of
        no window.

        Args:
            of_windows: bool [b, ..., w], or values of the first windows; the others are False.
        """
        places = self.of_tokens(num_tokens).clamp(max=of_windows.shape[-1])
        places = places.view(len(places), *[1] * (of_windows.dim() - 2), num_tokens)
        return F.pad(of_windows, (0, 1)).gather(
            -1, places.expand(*of_windows.shape[:-1], num_tokens)
        )

    def of_tokens(self, num_tokens: int) -> Tensor:
        """Return the window of each of the first tokens, int64 [1 or b, num_tokens]; w if no window
        contains the token."""
        count = self.begins.shape[1]
        places = torch.arange(num_tokens, device=self.begins.device).expand(len(self.begins), -1)
        found = torch.searchsorted(self.begins.contiguous(), places.contiguous(), right=True) - 1
        if not count:
            return torch.zeros_like(found)
        begins = self.begins.gather(1, found.clamp(min=0))
        return torch.where((found < 0) | (begins + self.size <= places), count, found)


def softmax_sum(x: Tensor, logits: Tensor) -> Tensor:
    """Return the sums [w, b, c] of the tokens x [w, m, b, c] of windows, with a softmax weight for
    each channel."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return (x * torch.softmax(logits, 1, dtype=dtype).to(x.dtype)).sum(1)
