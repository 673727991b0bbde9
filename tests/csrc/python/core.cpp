// The Python module scaledot_core, for tests only: the mathematics of csrc/core as it is compiled for the kernels, so
// that hypothesis can look for the positions, seeds and numbers at which it is wrong. test_core.py uses it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "core/mask.h"
#include "core/philox.h"

namespace py = pybind11;
using namespace scaledot;

namespace {

// The part of a call that masks read: lengths and positions.
struct Positions {
  Problem problem = {};

  Positions(int64_t query_length, int64_t key_length, int64_t diagonal, int64_t left, int64_t right) {
    problem.query_length = query_length;
    problem.key_length = key_length;
    problem.position = {diagonal, left, right};
  }

  std::pair<int64_t, int64_t> key_range(int64_t first_row, int64_t end_row) const {
    const Range range = scaledot::key_range(problem, {first_row, end_row});
    return {range.begin, range.end};
  }

  std::string tile_kind(int64_t first_row, int64_t end_row, int64_t first_key, int64_t end_key) const {
    switch (scaledot::tile_kind(problem, {first_row, end_row}, {first_key, end_key})) {
      case TileKind::skip: return "skip";
      case TileKind::partial: return "partial";
      default: return "full";
    }
  }
};

// Whether dropout keeps each of the first `columns` weights of a row.
std::vector<bool> dropout_keeps_row(std::array<int64_t, 2> seed, int64_t heads, double dropout_p, int64_t batch,
                                    int64_t head, int64_t row, int64_t columns) {
  Problem p = {};
  p.heads = heads;
  p.dropout_p = dropout_p;
  p.dropout_seed = seed.data();
  const DropoutRow stream = dropout_row(p, batch, head, row);
  std::vector<bool> keep_mask;
  for (int64_t column = 0; column < columns; ++column) keep_mask.push_back(dropout_keeps(stream, column));
  return keep_mask;
}

template <class Half>
uint16_t narrowed(float x) {
  Half half;
  narrow(x, half);
  return half.bits;
}

}  // namespace

PYBIND11_MODULE(scaledot_core, module) {
  py::class_<Positions>(module, "Positions")
      .def(py::init<int64_t, int64_t, int64_t, int64_t, int64_t>(), py::arg("query_length"), py::arg("key_length"),
           py::arg("diagonal"), py::arg("left"), py::arg("right"))
      .def("attends", [](const Positions& p, int64_t i, int64_t j) { return attends(p.problem, i, j); })
      .def("key_range", &Positions::key_range)
      .def("tile_kind", &Positions::tile_kind);
  module.attr("UNBOUNDED") = kUnbounded;
  module.def("philox", [](std::array<uint32_t, 2> key, std::array<uint32_t, 4> counter) {
    const PhiloxWords words = philox(key[0], key[1], counter[0], counter[1], counter[2], counter[3]);
    return std::array<uint32_t, 4>{words.word[0], words.word[1], words.word[2], words.word[3]};
  });
  module.def("dropout_keeps_row", &dropout_keeps_row);
  module.def("widen_bfloat16", [](uint16_t bits) { return widen(BFloat16{bits}); });
  module.def("widen_float16", [](uint16_t bits) { return widen(Float16{bits}); });
  module.def("narrow_bfloat16", &narrowed<BFloat16>);
  module.def("narrow_float16", &narrowed<Float16>);
}
