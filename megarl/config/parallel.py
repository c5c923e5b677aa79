"""`parallel.*`: how the trainer's models lie over its ranks."""

from pydantic import model_validator

from megarl.config.base import Section, key


class ParallelConfig(Section):
    tensor_model_parallel_size: int = key(1, "Ranks that share each weight matrix (Megatron tensor parallelism).", gt=0)
    sequence_parallel: bool = key(
        False, "Split activations outside the matrix products over the tensor-parallel ranks as well."
    )

    @model_validator(mode="after")
    def _sequence_parallel_needs_tensor_parallel(self):
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ValueError(
                "sequence_parallel=true needs tensor_model_parallel_size > 1; it splits over the tensor-parallel ranks"
            )
        return self
