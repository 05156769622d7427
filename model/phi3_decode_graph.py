"""Rung 4: the step of rung 3 captured once as a CUDA graph and replayed, so that Python launches nothing per token.

Whatever changes from step to step lives on the device: the token (fed back by the step itself), the position
(``kv_cache.lengths``) and the greedy choice. A Python int would be frozen at capture.
"""

import torch

from model.generate import greedy
from model.phi3_decode_triton import check_step, decode_step_at
from model.rope import longrope_border


class CapturedDecoder:
    """A decode step that is captured at its first use and then replayed, for every position of the cache.

    Subclasses write ``_launch``: from ``self.token`` [B] and ``kv_cache.lengths`` to ``self.logits`` [B, vocab] and
    ``self.token``, lengths advanced by one, all on the device. The graph reads the model's weights and the cache where
    they are: it survives ``kv_cache.reset()``, and moving the model needs a new decoder.
    """

    def __init__(self, model, kv_cache):
        self.model, self.kv_cache = model, kv_cache
        self.device = kv_cache.lengths.device
        self.border = longrope_border(model.config)
        self.token = torch.zeros(kv_cache.batch_size, dtype=torch.int64, device=self.device)
        self.logits = None
        self._graphs = {}

    @property
    def captured(self):
        """Whether the next step is there to be replayed."""
        return self._key() in self._graphs

    @torch.no_grad()
    def step(self, token_ids):
        """Logits [B, vocab] after ``token_ids`` [B]. ValueError where the cache is full or empty (see decode_step)."""
        check_step(self.model, self.kv_cache)
        self.token.copy_(token_ids)
        self._advance()
        return self.logits.clone()

    @torch.no_grad()
    def run(self, token_ids, num_steps):
        """``num_steps`` greedy tokens [B, num_steps] int64 after ``token_ids`` [B]: on the device, not waited for.

        A row whose logits hold NaN gives ``vocab_size``, as ``model.generate.greedy`` does. ValueError, and nothing
        done, where that many steps do not fit the cache or would cross longrope's border.
        """
        check_step(self.model, self.kv_cache)
        self.kv_cache.check_fits(num_steps)
        position = self.kv_cache.cur_pos
        if self.border is not None and position < self.border < position + num_steps:
            raise ValueError(
                f"{num_steps} steps from position {position} cross longrope's border {self.border}: "
                f"run {self.border - position}, then prefill the whole sequence again"
            )
        self.token.copy_(token_ids)
        return self._run(num_steps)

    def _run(self, num_steps):
        ids = torch.empty(len(self.token), num_steps, dtype=torch.int64, device=self.device)
        for i in range(num_steps):
            self._advance()
            ids[:, i] = self.token
        return ids

    def _advance(self):
        with torch.cuda.device(self.device):
            self._graph().replay()
        self.kv_cache.note_written(1)

    def _key(self):
        """What a graph is captured for; a step with another key gets a graph of its own."""
        return None

    def _graph(self):
        key = self._key()
        if key not in self._graphs:
            self._graphs[key] = self._capture()
        return self._graphs[key]

    def _capture(self):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("this step captures a CUDA graph itself: call it once before capturing around it")
        # Compiling, autotuning and the libraries' first-use allocations are not allowed during capture, so the step
        # runs once before, on a side stream. It writes the cache's row at the current position, which the step that
        # is about to follow writes again; token and lengths are put back.
        before = self.token.clone(), self.kv_cache.lengths.clone()
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            self._launch()
        torch.cuda.current_stream(self.device).wait_stream(side)
        self.token.copy_(before[0])
        self.kv_cache.lengths.copy_(before[1])
        graph = torch.cuda.CUDAGraph()
        # The graph must own the workspace that cuBLAS uses in it. One that was there before is PyTorch's, which
        # torch.compile frees whenever it captures a graph of its own: replays would write to what is no longer ours.
        torch._C._cuda_clearCublasWorkspaces()
        # thread_local: another thread's CUDA calls, a data loader's say, do not break the capture.
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            self._launch()
        torch._C._cuda_clearCublasWorkspaces()  # what others do on this stream takes another one
        return graph

    def _launch(self):
        raise NotImplementedError


class GraphDecoder(CapturedDecoder):
    """Rung 3's step as a CUDA graph, for any batch. ValueError without a CUDA device."""

    def __init__(self, model, kv_cache):
        super().__init__(model, kv_cache)
        if self.device.type != "cuda":
            raise ValueError(f'path "graph" needs a CUDA device, the cache is on {self.device}; use path="triton"')

    def _key(self):
        # Which of longrope's tables decode_step_at takes is decided on the host.
        return self.border is not None and self.kv_cache.cur_pos >= self.border

    def _launch(self):
        # After NaN logits the token is vocab_size, which is no row of the embedding: the NaN in the cache goes on.
        token = self.token.clamp(max=self.model.config.vocab_size - 1)
        logits = decode_step_at(self.model, token, self.kv_cache, self.kv_cache.lengths)
        self.logits = logits if self.logits is None else self.logits.copy_(logits)
        self.token.copy_(greedy(logits))
        self.kv_cache.lengths += 1
