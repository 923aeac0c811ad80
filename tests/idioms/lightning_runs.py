"""Lightning's Trainer and Fabric, as their users write them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim import lr_scheduler as schedules

from tests.idioms.framework_parts import enter, folder, loader, noisy
from tests.idioms.kit import Kit, loss_of, perceptron

Configure = Callable[[Kit, Any], Any]
"""What `configure_optimizers` returns, of the kit and the module."""


def _decaying(kit: Kit, module: Any) -> Any:
    optimizer = kit.optimizer(module, "AdamW", lr=0.01)
    return [optimizer], [schedules.ExponentialLR(optimizer, 0.5)]


def _on_plateau(kit: Kit, module: Any) -> Any:
    optimizer = kit.optimizer(module, "AdamW", lr=0.3)
    schedule = schedules.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "judged"}}


def _module(
    kit: Kit,
    make: Callable[[], Any] = perceptron,
    configure: Configure = _decaying,
    *,
    by_hand: bool = False,
) -> Any:
    import lightning as pl

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = make()
            self.automatic_optimization = not by_hand
            self.seen: list[float] = []

        def forward(self, x: Any) -> Any:
            return self.net(x)

        def training_step(self, batch: Any, _index: int) -> Any:
            loss = loss_of(self, batch)
            self.seen.append(loss.item())
            if not by_hand:
                return loss
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            return None

        def validation_step(self, batch: Any, _index: int) -> None:
            loss = loss_of(self, batch)
            self.seen.append(loss.item())
            self.log("judged", loss)

        def configure_optimizers(self) -> Any:
            return configure(kit, self)

    return Module()


def _trainer(**given: Any) -> Any:
    import lightning as pl

    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    options = {"max_epochs": 2, "accelerator": "cpu", "devices": 1, "num_sanity_val_steps": 0}
    return pl.Trainer(**{**options, **quiet, **given})


def _seen(module: Any) -> Any:
    """Losses, rates, and the model at the end."""
    optimizers = module.optimizers()
    optimizer = optimizers[0] if isinstance(optimizers, list) else optimizers
    return module.seen, [group["lr"] for group in optimizer.param_groups], module.net


def _fits(
    kit: Kit,
    *,
    make: Callable[[], Any] = perceptron,
    configure: Configure = _decaying,
    validates: bool = False,
    by_hand: bool = False,
    **trainer: Any,
) -> Any:
    module = _module(kit, make, configure, by_hand=by_hand)
    _trainer(**trainer).fit(module, loader(), loader(2, seed=9) if validates else None)
    return _seen(module)


def _averaging() -> Any:
    """A callback that validates an average of weights, and puts back what is trained."""
    import lightning as pl

    class Averaging(pl.Callback):  # type: ignore[misc]
        mean: Any = None

        def on_train_batch_end(self, _trainer: Any, module: Any, *_rest: Any) -> None:
            if self.mean is None:
                self.mean = copy.deepcopy(module.net.state_dict())
            for name, value in module.net.state_dict().items():
                self.mean[name].lerp_(value, 0.2)

        def on_validation_start(self, _trainer: Any, module: Any) -> None:
            self.kept = copy.deepcopy(module.net.state_dict())
            module.net.load_state_dict(self.mean)

        def on_validation_end(self, _trainer: Any, module: Any) -> None:
            module.net.load_state_dict(self.kept)

    return Averaging()


def _averages(kit: Kit) -> Any:
    return _fits(kit, validates=True, callbacks=[_averaging()])


def _averages_weights(kit: Kit, *, make: Callable[[], Any]) -> Any:
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    average = StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=1, annealing_epochs=2)
    return _fits(kit, make=make, validates=True, max_epochs=3, callbacks=[average])


def _goes_on_from_the_best(kit: Kit) -> Any:
    """The best of six epochs is not the last one; two more begin there."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    def configure(kit: Kit, module: Any) -> Any:
        return kit.optimizer(module, "AdamW", lr=0.05)

    module = _module(kit, configure=configure)
    with folder() as path:
        saver = ModelCheckpoint(path, filename="{epoch}", monitor="judged", save_top_k=1)
        trainer = _trainer(max_epochs=6, enable_checkpointing=True, callbacks=[saver])
        trainer.fit(module, loader(), loader(2, seed=9))
        best = int(saver.best_model_path.split("epoch=")[1].split(".")[0])
        assert best < 5, "the best is the last"
        again = _trainer(max_epochs=best + 3)
        again.fit(module, loader(), loader(2, seed=9), ckpt_path=saver.best_model_path)
    return best, _seen(module)


def _takes_the_best_weights(kit: Kit) -> Any:
    """The weights of the best epoch are loaded in a callback, while it trains."""
    import lightning as pl

    class Rewinds(pl.Callback):  # type: ignore[misc]
        best: Any = None
        least = float("inf")
        taken = 0

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            judged = trainer.callback_metrics["judged"].item()
            if judged < self.least:
                self.least, self.best = judged, copy.deepcopy(module.state_dict())
            else:
                module.load_state_dict(self.best)
                self.taken += 1

    rewinds = Rewinds()
    found = _fits(kit, validates=True, max_epochs=4, configure=_on_plateau, callbacks=[rewinds])
    assert rewinds.taken
    return found


def _stops_early(kit: Kit) -> Any:
    from lightning.pytorch.callbacks import EarlyStopping

    stopping = EarlyStopping("judged", patience=0)
    found = _fits(kit, validates=True, max_epochs=9, configure=_on_plateau, callbacks=[stopping])
    assert stopping.stopped_epoch, "it ran to the end"
    return stopping.stopped_epoch, found


def _thaws(kit: Kit) -> Any:
    """The head alone is trained in the first epoch, then the backbone with a rate of its own."""
    import lightning as pl
    from lightning.pytorch.callbacks import BackboneFinetuning

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            whole = noisy()
            self.backbone, self.net = whole[:2], whole[2:]
            self.seen: list[float] = []

        def training_step(self, batch: Any, _index: int) -> Any:
            loss = loss_of(lambda x: self.net(self.backbone(x)), batch)
            self.seen.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            trained = [value for value in self.parameters() if value.requires_grad]
            optimizer = kit.optimizer(trained, "AdamW", module=self, lr=0.01)
            return [optimizer], [schedules.ExponentialLR(optimizer, 0.9)]

    module = Module()
    thaws = BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=lambda _epoch: 1.5)
    _trainer(max_epochs=3, callbacks=[thaws]).fit(module, loader())
    assert len(module.optimizers().param_groups) == 2
    return _seen(module), module.backbone


def _finds_a_rate(kit: Kit) -> Any:
    from lightning.pytorch.tuner import Tuner

    module = _module(kit)
    module.lr = 0.01
    with folder() as path:
        trainer = _trainer(max_epochs=1, enable_checkpointing=True, default_root_dir=path)
        found = Tuner(trainer).lr_find(
            module, loader(), num_training=8, early_stop_threshold=None, update_attr=False
        )
        rates = found.results["loss"]
        trainer.fit(module, loader())
    return rates, _seen(module)


def _fabric(kit: Kit) -> Any:
    import lightning as pl

    fabric = pl.Fabric(accelerator="cpu", devices=1)
    model: Any = perceptron()
    optimizer: Any = kit.optimizer(model, lr=0.1, momentum=0.9)
    model, optimizer = fabric.setup(model, optimizer)
    losses = []
    for batch in fabric.setup_dataloaders(loader()):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=0.2)
        optimizer.step()
        losses.append(loss.item())
    return losses, dict(model.module.state_dict())


enter(
    {
        "Lightning: fit": _fits,
        "Lightning: validation between epochs": partial(_fits, validates=True),
        "Lightning: BatchNorm and Dropout in validation": partial(
            _fits, make=noisy, validates=True
        ),
        "Lightning: validation in the middle of an epoch": partial(
            _fits, make=noisy, validates=True, val_check_interval=2
        ),
        "Lightning: gradients are clipped": partial(_fits, gradient_clip_val=0.1),
        "Lightning: gradients are clipped by value": partial(
            _fits, gradient_clip_val=0.01, gradient_clip_algorithm="value"
        ),
        "Lightning: batches are accumulated": partial(_fits, accumulate_grad_batches=2),
        "Lightning: batches are accumulated and clipped": partial(
            _fits, accumulate_grad_batches=4, gradient_clip_val=0.1
        ),
        "Lightning: optimization by hand": partial(_fits, by_hand=True),
        "Lightning: mixed precision": partial(_fits, precision="bf16-mixed", validates=True),
        "Lightning: ReduceLROnPlateau watches the validation": partial(
            _fits, configure=_on_plateau, validates=True, max_epochs=4
        ),
        "Lightning: EarlyStopping": _stops_early,
        "Lightning: a callback validates an average": _averages,
        "Lightning: a callback goes back to the best weights": _takes_the_best_weights,
        "Lightning: StochasticWeightAveraging": partial(_averages_weights, make=perceptron),
        "Lightning: StochasticWeightAveraging with BatchNorm": partial(
            _averages_weights, make=noisy
        ),
        "Lightning: BackboneFinetuning": _thaws,
        "Lightning: ModelCheckpoint, and on from the best": _goes_on_from_the_best,
        "Lightning: a learning rate is found, then it trains": _finds_a_rate,
        "Lightning's Fabric": _fabric,
    }
)
