"""A causal model of Transformers' Step 3.7 without images, which Transformers lacks."""

from typing import Any

from torch import nn
from transformers import GenerationMixin
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7PreTrainedModel, Step3p7TextModel


class Step3p5ForCausalLM(Step3p7PreTrainedModel, GenerationMixin):
    """The text model and a head; its files have the names of published ones."""

    config_class = Step3p7TextConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = Step3p7TextModel(config)
        self.model.embed_tokens.padding_idx = None  # every token has a gradient
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Any) -> CausalLMOutputWithPast:
        """Return the logits of [b, s]."""
        hidden = self.model(input_ids).last_hidden_state
        return CausalLMOutputWithPast(logits=self.lm_head(hidden))


def register() -> None:
    """Give the class the names of weights of the whole model, without its encoder of images."""
    whole = get_checkpoint_conversion_mapping("step3p7")
    of_text = [rule for rule in whole if "model." not in str(rule.target_patterns)]
    register_checkpoint_conversion_mapping("step3p5", of_text, overwrite=True)


register()
