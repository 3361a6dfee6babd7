"""The quickstart's choices and figures, without running it."""

import math

import numpy
import pytest

from examples.quickstart.corpus import bits_per_byte, unigram_loss
from examples.quickstart.report import closing_table
from examples.quickstart.training_run import (
    ITERATION,
    LOSS,
    VALIDATION,
    Layout,
    choose_layout,
    recipe_for,
    show,
    torchrun,
)
from megatron.training.metrics.log_line import TrainingLine, training_line, validation_lines


@pytest.mark.parametrize("num_gpus", range(9))
def test_layout_fits_the_machine_and_the_model_fits_the_layout(num_gpus):
    layout = choose_layout(num_gpus)
    recipe = recipe_for(layout)
    assert layout.num_processes <= max(num_gpus, 4)
    assert layout.uses_gpu == (num_gpus > 0)
    assert recipe.num_heads % layout.tensor == 0
    assert recipe.num_layers % layout.pipeline == 0
    assert recipe.global_batch_size % (recipe.micro_batch_size * layout.data) == 0
    # A pipeline needs several micro batches a step, or its bubble is most of the step.
    num_microbatches = recipe.global_batch_size // (recipe.micro_batch_size * layout.data)
    assert layout.pipeline == 1 or num_microbatches >= 2 * layout.pipeline


def test_without_gpus_the_layout_is_tensor_2_pipeline_2():
    assert choose_layout(0) == Layout(tensor=2, pipeline=2, data=1, uses_gpu=False)


def test_log_lines_of_training_are_understood():
    line = training_line(
        TrainingLine(
            iteration=12,
            train_iters=360,
            consumed_samples=192,
            seconds_per_step=0.5,
            learning_rate=1e-3,
            global_batch_size=16,
            losses={"lm loss": 6.25},
            loss_scale=1.0,
            grad_norm=0.7,
            tflops_per_device=0.02,
        )
    )
    found = ITERATION.search(line)
    assert (found[1], found[2], float(found[3])) == ("12", "360", 500.0)
    assert float(LOSS.search(line)[1]) == 6.25
    shown = validation_lines("iteration 90 on validation set", {"lm loss": 5.5})
    assert VALIDATION.search(shown)[1] == "iteration 90 on validation set"
    assert float(VALIDATION.search(shown)[2]) == 5.5


def test_unigram_loss_of_equal_frequencies_is_the_entropy():
    counts = numpy.full(8, 10**9)
    assert unigram_loss(counts, counts) == pytest.approx(math.log(8))


def test_unigram_loss_is_finite_for_tokens_never_trained_on():
    assert unigram_loss(numpy.array([5, 0]), numpy.array([0, 3])) == pytest.approx(math.log(7))


def test_bits_per_byte_does_not_depend_on_the_tokenizer():
    # Eight nats over two tokens of four bytes, or over four tokens of two.
    assert bits_per_byte(4.0, 2, 8) == pytest.approx(bits_per_byte(2.0, 4, 8))


def test_shown_command_is_the_command():
    import shlex

    command = torchrun(choose_layout(0), "a.py", ["--prompt", "To be, or not", "--lr", "1e-3"])
    assert shlex.split(show(command).replace("\\\n", "")) == command


def test_closing_table_is_a_closed_box():
    lines = closing_table([("loss", "5.0"), ("a longer name", "a longer value, too")]).splitlines()
    assert len({len(line) for line in lines}) == 1
