// anychip_cpu._native: addresses and numbers from Python into the operators' structs, and no more.
// operators.h documents every signature, backends/cpu/anychip_cpu/_native.pyi what all have in
// common.
#include "bindings.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bfloat16_product.h"
#include "cache.h"
#include "isa.h"
#include "parallel.h"
#include "philox.h"

namespace anychip::cpu {
namespace {

// Raised whenever a signature changes its meaning; Python reads it as build_info()["abi"].
constexpr int kInterfaceVersion = 11;

using Addresses = std::vector<uintptr_t>;
using Sizes = std::vector<int64_t>;
using Codes = std::vector<int>;

std::string listed(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

}  // namespace

Signature::Signature(const char* function, std::initializer_list<const char*> names)
    : function_(function) {
  for (const char* given : names) {
    std::string name(given);
    const bool optional = name.back() == '=';
    if (optional) name.pop_back();
    names_.push_back(name);
    if (!optional) required_ = names_.size();
  }
}

void Signature::read(PyObject* const* arguments, size_t positional, PyObject* keywords,
                     PyObject** values) const {
  const auto refuse = [&](const std::string& got) {
    throw py::type_error(function_ + "(" + listed(names_) + "): expected " +
                         std::to_string(required_) + " to " + std::to_string(names_.size()) +
                         " arguments, got " + got);
  };
  const auto named = static_cast<size_t>(keywords ? PyTuple_GET_SIZE(keywords) : 0);
  if (positional > names_.size()) refuse(std::to_string(positional));
  std::copy(arguments, arguments + positional, values);
  for (size_t i = 0; i < named; ++i) {
    const auto name =
        py::handle(PyTuple_GET_ITEM(keywords, static_cast<Py_ssize_t>(i))).cast<std::string>();
    const auto found = std::find(names_.begin(), names_.end(), name);
    if (found == names_.end()) refuse("one called " + name);
    PyObject*& place = values[found - names_.begin()];
    if (place) refuse(name + " twice");
    place = arguments[positional + i];
  }
  for (size_t i = positional; i < required_; ++i) {
    if (!values[i]) refuse("none for " + names_[i]);
  }
}

void set_error() noexcept {
  try {
    throw;
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const py::builtin_exception& error) {
    error.set_error();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::out_of_range& error) {
    PyErr_SetString(PyExc_IndexError, error.what());
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
}

std::string Signature::text(const char* const* kinds) const {
  std::vector<std::string> all;
  for (size_t i = 0; i < names_.size(); ++i) {
    all.push_back(names_[i] + ": " + kinds[i] + (i < required_ ? "" : " = 0"));
  }
  return function_ + "(" + listed(all) + ")";
}

namespace {

void check_length(const char* name, size_t expected, size_t got) {
  check(expected == got, name,
        "expected a list of " + std::to_string(expected) + ", one per tensor, got " +
            std::to_string(got));
}

template <class T = void>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

std::vector<TensorRef> tensors_of(const Addresses& data, const Sizes& numels, const Codes& dtypes) {
  check_length("numels", data.size(), numels.size());
  check_length("dtypes", data.size(), dtypes.size());
  std::vector<TensorRef> tensors;
  tensors.reserve(data.size());
  for (size_t i = 0; i < data.size(); ++i) {
    tensors.push_back({at(data[i]), numels[i], enum_of<DType>(dtypes[i])});
  }
  return tensors;
}

// The lists of one call of an update rule, as tensors. A list of states may be empty.
Update update_of(const Addresses& params, const Addresses& grads, const Addresses& first_states,
                 const Addresses& second_states, const Addresses& low_precision,
                 const Sizes& numels, const Codes& param_dtypes, const Codes& grad_dtypes,
                 const Codes& low_dtypes, uintptr_t lr, uintptr_t step, uintptr_t scale,
                 uintptr_t clip, uintptr_t found_inf, const Addresses& first_scales,
                 const Addresses& second_scales) {
  const size_t count = params.size();
  check_length("grads", count, grads.size());
  const auto state = [&](const char* name, const Addresses& states, size_t i) {
    if (states.empty()) return static_cast<float*>(nullptr);
    check_length(name, count, states.size());
    return at<float>(states[i]);
  };
  const bool has_low = !low_precision.empty();
  if (has_low) check_length("low_precision", count, low_precision.size());
  const std::vector<TensorRef> param = tensors_of(params, numels, param_dtypes);
  const std::vector<TensorRef> grad = tensors_of(grads, numels, grad_dtypes);
  const std::vector<TensorRef> low =
      has_low ? tensors_of(low_precision, numels, low_dtypes) : std::vector<TensorRef>(count);
  Update update{
      {}, at<float>(lr), at<float>(step), at<float>(scale), at<float>(clip), at<float>(found_inf)};
  update.tensors.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    update.tensors.push_back(
        {param[i],
         grad[i],
         {state("first_states", first_states, i), state("second_states", second_states, i)},
         low[i],
         {state("first_scales", first_scales, i), state("second_scales", second_scales, i)}});
  }
  return update;
}

void bind_lists(py::module_& m) {
  py::class_<Tensors>(m, "Tensors")
      .def(py::init([](const Addresses& tensors, const Sizes& numels, const Codes& dtypes) {
             return Tensors{tensors_of(tensors, numels, dtypes)};
           }),
           py::arg("tensors"), py::arg("numels"), py::arg("dtypes"));
  py::class_<Update>(m, "Update")
      .def(py::init(&update_of), py::kw_only(), py::arg("params"), py::arg("grads"),
           py::arg("first_states"), py::arg("second_states"), py::arg("low_precision"),
           py::arg("numels"), py::arg("param_dtypes"), py::arg("grad_dtypes"),
           py::arg("low_dtypes"), py::arg("lr"), py::arg("step"), py::arg("scale"), py::arg("clip"),
           py::arg("found_inf"), py::arg("first_scales") = Addresses{},
           py::arg("second_scales") = Addresses{});
}

// The fields of operators.h in their order.
void bind_operators(py::module_& m) {
  bind(m, "rms_norm_forward", &rms_norm_forward, "x", "weight", "y", "rstd", "rows", "hidden",
       "eps", "dtype", "weight_dtype", "residual=", "total=", "residual_dtype=");
  bind(m, "rms_norm_backward", &rms_norm_backward, "grad", "x", "weight", "rstd", "dx", "dweight",
       "rows", "hidden", "dtype", "weight_dtype",
       "dtotal=", "dresidual=", "residual_dtype=", "rng=", "p=", "row_index=", "width=");
  bind(m, "layer_norm_forward", &layer_norm_forward, "x", "weight", "bias", "y", "mean", "rstd",
       "rows", "hidden", "eps", "dtype", "weight_dtype", "residual=", "total=", "residual_dtype=");
  bind(m, "layer_norm_backward", &layer_norm_backward, "grad", "x", "weight", "mean", "rstd", "dx",
       "dweight", "dbias", "rows", "hidden", "dtype", "weight_dtype",
       "dtotal=", "dresidual=", "residual_dtype=", "rng=", "p=", "row_index=", "width=");
  bind(m, "group_norm_forward", &group_norm_forward, "x", "weight", "bias", "y", "mean", "rstd",
       "batch", "groups", "channels", "size", "eps", "dtype", "weight_dtype");
  bind(m, "group_norm_backward", &group_norm_backward, "grad", "x", "weight", "mean", "rstd", "dx",
       "dweight", "dbias", "batch", "groups", "channels", "size", "dtype", "weight_dtype");
  bind(m, "conv1d_forward", &conv1d_forward, "x", "weight", "bias", "y", "batch", "channels",
       "length", "taps", "dtype", "weight_dtype");
  bind(m, "conv1d_backward", &conv1d_backward, "grad", "x", "weight", "dx", "dweight", "dbias",
       "batch", "channels", "length", "taps", "dtype", "weight_dtype");
  bind(m, "turn", &turn, "x", "y", "batch", "rows", "columns", "dtype");
  bind(m, "dropout", &dropout, "x", "y", "numel", "columns", "dtype", "rng", "p",
       "row_index=", "width=", "column=");
  bind(m, "bias_dropout_add", &bias_dropout_add, "x", "residual", "bias", "y", "rows", "hidden",
       "dtype", "residual_dtype", "bias_dtype", "rng", "p", "row_index=", "width=", "column=");
  bind(m, "bias_dropout_backward", &bias_dropout_backward, "grad", "dx", "dbias", "rows", "hidden",
       "dtype", "rng", "p", "row_index=", "width=", "column=");
  bind(m, "activation_forward", &activation_forward, "x", "up", "bias", "y", "rows", "hidden",
       "function", "beta", "threshold", "dtype", "bias_dtype");
  bind(m, "activation_backward", &activation_backward, "grad", "x", "up", "bias", "dx", "dup",
       "dbias", "rows", "hidden", "function", "beta", "threshold", "dtype", "bias_dtype");
  bind(m, "softmax_forward", &softmax_forward, "x", "y", "mask", "mask_rows", "bias", "bias_rows",
       "mask_numel", "bias_numel", "rows", "queries", "keys", "scale", "causal", "dtype",
       "bias_dtype");
  bind(m, "softmax_backward", &softmax_backward, "grad", "y", "dx", "rows", "keys", "scale",
       "dtype");
  bind(m, "attention_forward", &attention_forward, "q", "q_batch", "q_row", "q_head", "k",
       "k_batch", "k_row", "k_head", "v", "v_batch", "v_row", "v_head", "y", "lse", "batch",
       "queries", "keys", "heads", "kv_heads", "head_dim", "ends_q", "ends_k", "scale", "causal",
       "dtype", "y_dtype", "rng=", "p=", "row_index=", "width=", "column=", "key_index=");
  bind(m, "attention_backward", &attention_backward, "grad", "grad_batch", "grad_row", "grad_head",
       "q", "q_batch", "q_row", "q_head", "k", "k_batch", "k_row", "k_head", "v", "v_batch",
       "v_row", "v_head", "y", "y_batch", "y_row", "y_head", "lse", "dq", "dk", "dv", "batch",
       "queries", "keys", "heads", "kv_heads", "head_dim", "ends_q", "ends_k", "scale", "causal",
       "dtype", "y_dtype", "rng=", "p=", "row_index=", "width=", "column=", "key_index=");
  bind(m, "rope", &rope, "q", "k", "cos", "sin", "q_out", "k_out", "batch", "seq", "heads",
       "kv_heads", "head_dim", "interleaved", "inverse", "dtype");
  bind(m, "cross_entropy_forward", &cross_entropy_forward, "logits", "target", "loss", "lse",
       "rows", "vocab", "ignore_index", "label_smoothing", "z_loss", "reduction", "dtype");
  bind(m, "cross_entropy_backward", &cross_entropy_backward, "grad", "logits", "target", "lse",
       "dlogits", "rows", "vocab", "ignore_index", "label_smoothing", "z_loss", "reduction",
       "dtype");
  bind(m, "logit_partials_forward", &logit_partials_forward, "logits", "target", "lse", "picked",
       "total", "rows", "vocab", "first");
  bind(m, "logit_partials_backward", &logit_partials_backward, "lse_grad", "picked_grad",
       "total_grad", "logits", "target", "lse", "dlogits", "rows", "vocab", "first");
  for (const auto& [name, sum] :
       {std::pair{"sum_rows", &sum_rows}, {"sum_rows_by_index", &sum_rows_by_index}}) {
    bind(m, name, sum, "x", "index", "weights", "y", "rows", "terms", "x_rows", "width", "dtype",
         "weight_dtype");
  }
  bind(m, "places_by_expert", &places_by_expert, "experts", "place", "choice", "ends", "count",
       "num_experts");
  bind(m, "spread_rows", &spread_rows, "y", "x", "index", "weights", "dx", "dweights", "rows",
       "terms", "width", "dtype", "weight_dtype");
  bind(m, "quantize", &quantize, "x", "rng", "codes", "scales", "numel", "block", "format",
       "dtype");
  bind(m, "dequantize", &dequantize, "codes", "scales", "y", "numel", "block", "format");
  bind(m, "product", &product, "left", "right", "bias", "out", "rows", "columns", "depth",
       "left_transposed", "right_transposed", "adds");
  bind(m, "bfloat16_product", &bfloat16_product, "left", "right", "panels", "bias", "out", "rows",
       "columns", "depth", "left_transposed", "right_transposed", "adds");
  bind(m, "bfloat16_panels", &bfloat16_panels, "right", "panels", "columns", "depth", "transposed");
  bind(m, "hadamard", &hadamard, "x", "y", "numel", "block", "dtype");
  bind(m, "top_k", &top_k, "x", "y", "indices", "rows", "width", "count", "dtype");
  for (const auto& [name, rule] : {std::pair{"adamw", &adamw}, {"adamw_8bit", &adamw_8bit}}) {
    bind(m, name, rule, "update", "beta1", "beta2", "eps", "weight_decay");
  }
  bind(m, "sgd", &sgd, "update", "momentum", "nesterov", "weight_decay", "decoupled");
  bind(m, "lion", &lion, "update", "beta1", "beta2", "weight_decay");
  bind(m, "lamb", &lamb, "update", "trust", "correction1", "correction2", "beta1", "beta2", "eps",
       "weight_decay");
  bind(m, "lamb_sums_of_squares", &lamb_sums_of_squares, "update", "out", "correction1",
       "correction2", "beta1", "beta2", "eps", "weight_decay");
  bind(m, "sums_of_squares", &sums_of_squares, "tensors", "out");
  bind(m, "l2_norm", &l2_norm, "tensors", "out");
  bind(m, "clip", &clip, "tensors", "norm", "max_norm");
  bind(m, "unscale_and_check", &unscale_and_check, "grads", "scale", "found_inf");
}

// A list for tests: more of it would be gigabytes of Python integers.
constexpr int64_t kMaxWords = int64_t{1} << 24;

std::vector<uint32_t> philox(uint64_t seed, uint64_t offset, int64_t nwords) {
  check(nwords >= 0 && nwords <= kMaxWords, "philox",
        "expected 0 <= nwords <= 2^24, got " + std::to_string(nwords));
  std::vector<uint32_t> words;
  words.reserve(static_cast<size_t>(nwords));
  for (uint64_t block = offset; static_cast<int64_t>(words.size()) < nwords; ++block) {
    const auto four =
        philox_block({static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32), 0, 0},
                     {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
    for (const uint32_t word : four) {
      if (static_cast<int64_t>(words.size()) < nwords) words.push_back(word);
    }
  }
  return words;
}

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const KernelTable* table : available_tables()) names.emplace_back(table->name);
  return names;
}

py::dict build_info() {
  py::dict info;
  info["version"] = ANYCHIP_VERSION;
  info["abi"] = std::to_string(kInterfaceVersion);
  info["compiler"] = ANYCHIP_COMPILER;
  info["flags"] = ANYCHIP_FLAGS;
  info["isas_compiled"] = ANYCHIP_ISAS;
  info["isa"] = kernels().name;
  info["openmp"] = openmp_status().library;
  return info;
}

template <class Enum>
void add_constants(py::module_& m) {
  int number = 0;
  for (const char* name : Names<Enum>::all) m.attr(name) = number++;
}

void bind_information(py::module_& m) {
  add_constants<DType>(m);
  add_constants<Reduction>(m);
  add_constants<CodeFormat>(m);
  add_constants<Activation>(m);
  m.def("philox", &philox, py::arg("seed"), py::arg("offset"), py::arg("nwords"));
  m.def("set_isa", &set_isa, py::arg("name"));
  m.def("set_last_cache", &set_last_cache, py::arg("nbytes"));
  m.def("available_isas", &available_isas);
  m.def("num_threads", &num_threads);
  m.def("packed_numel", &packed_numel, py::arg("columns"), py::arg("depth"));
  m.def("has_block_products", &has_block_products);
  m.def(
      "is_permutation",
      [](uintptr_t index, int64_t count) {
        return is_permutation(reinterpret_cast<const int64_t*>(index), count);
      },
      py::arg("index"), py::arg("count"));
  m.def("openmp_status", [] {
    const OpenMPStatus status = openmp_status();
    return std::make_pair(status.ok, status.message);
  });
  m.def("build_info", &build_info);
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "Native CPU kernels of anychip; see _native.pyi.";
  try {
    bind_openmp("libtorch_cpu.so");
  } catch (const std::runtime_error& error) {
    throw py::import_error(error.what());
  }
  bind_block_products("libtorch_cpu.so");
  bind_lists(m);
  bind_operators(m);
  bind_information(m);
}

}  // namespace anychip::cpu
