// Sums of chosen rows and their gradients over the threads, which share the rows that are summed up
// to: a row is one thread's, and its terms are added in order.
#include <algorithm>
#include <utility>
#include <vector>

#include "checks.h"
#include "parallel.h"

namespace anychip::cpu {
namespace {

void check_index(const char* where, const int64_t* index, int64_t count, int64_t rows) {
  if (count == 0) return;
  check_address(where, "index", index);
  bool is_within = true;  // all of them, without a branch
  for (int64_t i = 0; i < count; ++i) {
    is_within &= static_cast<uint64_t>(index[i]) < static_cast<uint64_t>(rows);
  }
  if (is_within) return;
  const auto [low, high] = std::minmax_element(index, index + count);
  throw std::out_of_range(std::string(where) + ": expected rows from 0 to " +
                          std::to_string(rows - 1) + ", got " + std::to_string(*low) + " to " +
                          std::to_string(*high));
}

void run_sums(const RowSums& args, int64_t terms) {
  parallel_items(args.rows, args.width * (1 + terms / std::max<int64_t>(1, args.rows)),
                 [&](Range rows) { kernels().sum_rows(args, rows); });
}

}  // namespace

void sum_rows(const RowSums& args) {
  const char* where = "sum_rows";
  const Size width{"width", args.width}, rows{"rows", args.rows};
  const int64_t terms = check_sizes(where, {rows, {"terms", args.terms}});
  check_sizes(where, {rows, {"terms", args.terms}, width});
  const int64_t given = check_sizes(where, {{"x_rows", args.x_rows}, width});
  if (args.rows > 0 && args.width > 0) {
    check_address(where, "y", args.y);
    if (terms > 0 && given > 0) check_address(where, "x", args.x);
  }
  check_index(where, args.index, terms, args.x_rows);
  run_sums(args, terms);
}

void sum_rows_by_index(const RowSums& args) {
  const char* where = "sum_rows_by_index";
  const Size width{"width", args.width};
  const int64_t given = check_sizes(where, {{"x_rows", args.x_rows}, width});
  check(args.terms == 1, where, "expected terms 1, got " + std::to_string(args.terms));
  if (check_sizes(where, {{"rows", args.rows}, width}) > 0) check_address(where, "y", args.y);
  if (given > 0) check_address(where, "x", args.x);
  check_index(where, args.index, args.x_rows, args.rows);
  // The rows of x by where they go, those of one place in order.
  std::vector<int64_t> ends(static_cast<size_t>(args.rows) + 1);
  std::vector<int64_t> order(static_cast<size_t>(args.x_rows));
  for (int64_t i = 0; i < args.x_rows; ++i) ++ends[static_cast<size_t>(args.index[i]) + 1];
  for (size_t row = 1; row < ends.size(); ++row) ends[row] += ends[row - 1];
  for (int64_t i = 0; i < args.x_rows; ++i) {
    order[static_cast<size_t>(ends[static_cast<size_t>(args.index[i])]++)] = i;
  }
  RowSums sorted = args;
  sorted.index = order.data();
  sorted.ends = ends.data();
  sorted.weights = nullptr;
  run_sums(sorted, args.x_rows);
}

void places_by_expert(const Places& args) {
  const char* where = "places_by_expert";
  check_sizes(where, {{"count", args.count}});
  if (check_sizes(where, {{"num_experts", args.num_experts}}) > 0) {
    check_address(where, "ends", args.ends);
  }
  if (args.count > 0) {
    check_address(where, "experts", args.experts);
    check_address(where, "place", args.place);
    check_address(where, "choice", args.choice);
  }
  int64_t total = 0, others = 0;
  const auto next_of = [&](int64_t expert) -> int64_t& {
    return expert >= 0 && expert < args.num_experts ? args.ends[expert] : others;
  };
  std::fill_n(args.ends, args.num_experts, 0);
  for (int64_t i = 0; i < args.count; ++i) ++next_of(args.experts[i]);
  // From how many there are of each to where they begin; at last, to where they end.
  for (int64_t expert = 0; expert < args.num_experts; ++expert) {
    total += std::exchange(args.ends[expert], total);
  }
  others = total;
  for (int64_t i = 0; i < args.count; ++i) {
    args.place[i] = next_of(args.experts[i])++;
    args.choice[args.place[i]] = i;
  }
}

bool is_permutation(const int64_t* index, int64_t count) {
  const char* where = "is_permutation";
  if (check_sizes(where, {{"count", count}}) == 0) return true;
  check_address(where, "index", index);
  std::vector<bool> seen(static_cast<size_t>(count));
  return std::all_of(index, index + count, [&](int64_t i) {
    if (i < 0 || i >= count || seen[static_cast<size_t>(i)]) return false;
    return static_cast<bool>(seen[static_cast<size_t>(i)] = true);
  });
}

void spread_rows(const RowSpread& args) {
  const char* where = "spread_rows";
  const Size rows{"rows", args.rows}, terms{"terms", args.terms};
  const int64_t places = check_sizes(where, {rows, terms});
  if (check_sizes(where, {rows, terms, {"width", args.width}}) > 0) {
    check_address(where, "y", args.y);
    if (args.dweights) check_address(where, "x", args.x);
  }
  check_index(where, args.index, places, places);
  parallel_items(args.rows, args.width * (1 + args.terms),
                 [&](Range range) { kernels().spread_rows(args, range); });
}

}  // namespace anychip::cpu
