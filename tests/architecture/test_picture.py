"""The picture of the layers is that of the code."""

from tests.architecture.picture import TARGET, layers, picture


def test_the_picture_of_the_layers_is_up_to_date():
    assert TARGET.read_text() == picture(layers()), "python -m tests.architecture.picture"
