"""Sudoku of any box: a generator of minimal puzzles, a solver, symmetries.

A box of 2 × 3 has two rows and three columns; its grid is 6 × 6, with the digits 1 to 6. A grid is a flat list of
cells, row by row, with 0 for an empty one.
"""
import functools
import random

import numpy as np


@functools.cache
def units_of_cells(rows, columns):
    """Returns the numbers of the row, column and box of each cell, (cells, 3), for such boxes."""
    side = rows * columns
    # Rows are 0 to side - 1, columns side to 2 side - 1, then boxes. A band is `rows` lines high and has side / columns
    # = `rows` boxes.
    found = []
    for cell in range(side * side):
        row, column = divmod(cell, side)
        box = row // rows * rows + column // columns
        found.append((row, side + column, 2 * side + box))
    return tuple(found)


def solve(puzzle, rows, columns, limit=2, shuffle=None):
    """Returns a list of at most `limit` solutions. It fills the cell with the fewest possible digits first. shuffle: a
    random.Random that draws the order of digits."""
    search = _Search(puzzle, rows, columns, limit, shuffle)
    if search.is_consistent:
        search.fill([cell for cell, digit in enumerate(puzzle) if not digit])
    return search.solutions


class _Search:
    """Backtracking. The digits of each row, column and box are bits in `used`, so a cell's choices are one expression,
    and removing a digit is the same operation as setting it."""

    def __init__(self, puzzle, rows, columns, limit, shuffle):
        self.units = units_of_cells(rows, columns)
        self.side = rows * columns
        self.limit = limit
        self.shuffle = shuffle
        self.grid = list(puzzle)
        self.used = [0] * (3 * self.side)
        self.solutions = []
        self.is_consistent = True
        for cell, digit in enumerate(puzzle):
            if digit:
                self.is_consistent &= not any(self.used[unit] >> digit & 1 for unit in self.units[cell])
                self._flip(cell, digit)

    def _flip(self, cell, digit):
        for unit in self.units[cell]:
            self.used[unit] ^= 1 << digit

    def _emptiest(self, empty):
        """Returns the first cell with the fewest choices, and its choices as bits."""
        units = self.units
        used = self.used
        everything = (2 << self.side) - 2  # bits 1 to side
        best = best_choices = None
        for cell in empty:
            row, column, box = units[cell]
            choices = everything & ~(used[row] | used[column] | used[box])
            if best is None or choices.bit_count() < best_choices.bit_count():
                best = cell
                best_choices = choices
                if choices.bit_count() < 2:  # cannot be beaten
                    break
        return best, best_choices

    def fill(self, empty):
        """Adds the solutions in which the cells `empty` are filled."""
        if not empty:
            self.solutions.append(list(self.grid))
            return
        cell, choices = self._emptiest(empty)
        digits = [digit for digit in range(1, self.side + 1) if choices >> digit & 1]
        if self.shuffle:
            self.shuffle.shuffle(digits)
        rest = [other for other in empty if other != cell]
        for digit in digits:
            self.grid[cell] = digit
            self._flip(cell, digit)
            self.fill(rest)
            self._flip(cell, digit)
            self.grid[cell] = 0
            if len(self.solutions) >= self.limit:
                return


def generate(rows, columns, seed):
    """Returns a minimal puzzle and its only solution. Without any one of its digits, a minimal puzzle has several
    solutions. seed: any hashable number or text."""
    generator = random.Random(seed)
    cells = (rows * columns) ** 2
    solution = solve([0] * cells, rows, columns, limit=1, shuffle=generator)[0]
    puzzle = list(solution)
    # One pass is enough: a needed digit stays needed without others, because fewer digits never have fewer solutions.
    for cell in generator.sample(range(cells), cells):
        digit = puzzle[cell]
        puzzle[cell] = 0
        if len(solve(puzzle, rows, columns)) > 1:
            puzzle[cell] = digit
    return puzzle, solution


# Symmetries: they turn a puzzle into another that is as hard


def draw_symmetries(grids, rows, columns, generator):
    """Returns the grids, a list of arrays (N, cells), in another form, the same row of all in the same way: bands, rows
    in a band, stacks, columns in a stack and digits permuted, and with square boxes transposed."""
    count = grids[0].shape[0]
    side = rows * columns
    # of_rows and of_columns: (N, side). digits: (N, side + 1), the new digit for each one, and 0 for 0.
    of_rows = _permuted_lines(generator, count, side, rows)
    of_columns = _permuted_lines(generator, count, side, columns)
    digits = np.concatenate([np.zeros((count, 1), int), 1 + generator.random((count, side)).argsort(1)], 1)
    is_transposed = (generator.random(count) < 0.5) & (rows == columns)
    results = []
    for grid in grids:
        grid = np.take_along_axis(grid.reshape(count, side, side), of_rows[:, :, None], 1)
        grid = np.take_along_axis(grid, of_columns[:, None, :], 2)
        grid = np.where(is_transposed[:, None, None], grid.swapaxes(1, 2), grid).reshape(count, -1)
        results.append(np.take_along_axis(digits, grid, 1))
    return results


def _permuted_lines(generator, count, side, per_band):
    """Returns orders of the lines, (count, side), that keep the lines of a band together."""
    bands = generator.random((count, side // per_band)).argsort(1)
    within = generator.random((count, side // per_band, per_band)).argsort(2)
    return (bands[:, :, None] * per_band + within).reshape(count, side)


def fingerprints(puzzles, rows, columns):
    """Returns a number for each of the puzzles (N, cells), uint64 (N,), equal for all forms of a puzzle."""
    # Colours of the cells are refined (Weisfeiler and Leman): a cell's new colour depends on the colours in its row,
    # column and box, and on those of cells with the same digit, in any order. Different puzzles almost never agree.
    side = rows * columns
    units = np.array(units_of_cells(rows, columns))
    member = np.zeros((3 * side, side * side), bool)
    for kind in range(3):
        member[units[:, kind], np.arange(side * side)] = True
    # Colours are (N, cells); the first ones say whether a cell is given. Sums depend on no order, so permutations keep
    # them, and may overflow. Mixing and factors keep apart the parts of cell, lines, box and digit. A row counts like a
    # column only if transposing is a symmetry. Six rounds tell all 36 minimal 4 × 4 Sudokus apart.
    colours = _mix((puzzles > 0).astype(np.uint64))
    with np.errstate(over="ignore"):
        for _ in range(6):
            of_units = np.stack([colours[:, inside].sum(1, dtype=np.uint64) for inside in member], 1)
            by_digit = np.zeros((len(puzzles), side + 1), np.uint64)  # empty cells share no digit
            for digit in range(1, side + 1):
                by_digit[:, digit] = np.where(puzzles == digit, colours, np.uint64(0)).sum(1, dtype=np.uint64)
            row, column, box = (_mix(of_units[:, units[:, kind]]) for kind in range(3))
            lines = row + column if rows == columns else _mix(row + np.uint64(1)) + column
            same = np.take_along_axis(_mix(by_digit), puzzles, 1)
            colours = _mix(colours * np.uint64(3) + lines + _mix(box + np.uint64(2)) + same * np.uint64(5))
        return _mix(colours).sum(1, dtype=np.uint64)


def _mix(x):
    """Spreads the bits of uint64 numbers (splitmix64, Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))
