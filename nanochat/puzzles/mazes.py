"""Mazes: a generator, shortest paths, symmetries. A maze is a flat list of cells, row by row."""
import hashlib
import random
from collections import deque

import numpy as np

WALL, FREE, START, GOAL, PATH = range(1, 6)
LETTERS = " #.SG*"  # of 0 to PATH, for a person


def generate(side, min_path, seed, attempts=1000):
    """Returns a maze of side × side cells, and the same with its shortest path from a random start to a random goal.
    The path is longer than `min_path` cells; None if no attempt has one."""
    generator = random.Random(seed)
    for _ in range(attempts):
        cells = _carve(side, generator)
        free = [cell for cell, what in enumerate(cells) if what == FREE]
        start, goal = generator.sample(free, 2)
        path = shortest_path(cells, side, start, goal)
        if len(path) > min_path:
            cells[start] = START
            cells[goal] = GOAL
            solved = list(cells)
            for cell in path[1:-1]:
                solved[cell] = PATH
            return cells, solved
    return None


def _carve(side, generator):
    """Returns walls and free cells."""
    # Rooms are the cells with even coordinates, and the cell between two rooms is their wall. A random depth-first walk
    # enters each room once, so it leaves exactly one way between any two rooms. The cells freed at the end add others.
    cells = [WALL] * (side * side)
    cells[0] = FREE
    stack = [(0, 0)]
    while stack:
        y, x = stack[-1]
        ways = []
        for dy, dx in ((0, 2), (2, 0), (0, -2), (-2, 0)):
            is_inside = 0 <= y + dy < side and 0 <= x + dx < side
            if is_inside and cells[(y + dy) * side + x + dx] == WALL:
                ways.append((dy, dx))
        if not ways:
            stack.pop()
            continue
        dy, dx = generator.choice(ways)
        cells[(y + dy // 2) * side + x + dx // 2] = FREE
        cells[(y + dy) * side + x + dx] = FREE
        stack.append((y + dy, x + dx))
    for cell in generator.sample(range(side * side), side * side // 20):
        cells[cell] = FREE
    return cells


def shortest_path(cells, side, start, goal):
    """Returns the cells of a shortest path with both ends, or []. The maze alone determines which one of several."""
    before = {start: start}  # for each found cell, the one before it
    queue = deque([start])
    while queue and goal not in before:
        cell = queue.popleft()
        y, x = divmod(cell, side)
        for dy, dx in ((0, 1), (1, 0), (0, -1), (-1, 0)):
            there = (y + dy) * side + x + dx
            if 0 <= y + dy < side and 0 <= x + dx < side and cells[there] != WALL and there not in before:
                before[there] = cell
                queue.append(there)
    if goal not in before:
        return []
    path = [goal]
    while path[-1] != start:
        path.append(before[path[-1]])
    return path[::-1]


def draw_symmetries(grids, side, generator):
    """Returns the grids, a list of arrays (N, cells), turned and mirrored, the same row of all in the same way."""
    count = grids[0].shape[0]
    turn = generator.integers(8, size=count)
    # Eight arrays (N, cells); row i is taken from array turn[i].
    return [np.choose(turn[:, None], _all_forms(grid, side)) for grid in grids]


def _all_forms(grid, side):
    return [form.reshape(len(grid), -1) for form in square_forms(grid.reshape(-1, side, side))]


def square_forms(grids):
    """Returns grids (…, rows, columns) turned four times, and then mirrored: a list of eight arrays."""
    turned = [np.rot90(grids, k, (-2, -1)) for k in range(4)]
    return [*turned, *(one.swapaxes(-2, -1) for one in turned)]


def fingerprints(puzzles, side):
    """Returns a number for each of the puzzles (N, cells), uint64, equal for all that are turned or mirrored."""
    forms = _all_forms(np.asarray(puzzles, np.uint8), side)
    found = []
    for number in range(len(puzzles)):
        smallest = min(form[number].tobytes() for form in forms)
        found.append(int.from_bytes(hashlib.sha256(smallest).digest()[:8], "little"))
    return np.array(found, np.uint64)
