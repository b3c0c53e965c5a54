// anychip_cpu._native: addresses and numbers from Python into the operators' structs, and no more.
// The Python side of every signature is documented in backends/cpu/anychip_cpu/_native.pyi.
#include "bindings.h"

#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "isa.h"
#include "parallel.h"
#include "philox.h"

namespace anychip::cpu {
namespace {

// Raised whenever a signature changes its meaning; Python reads it as build_info()["abi"].
constexpr int kInterfaceVersion = 6;

using Addresses = std::vector<uintptr_t>;
using Sizes = std::vector<int64_t>;
using Codes = std::vector<int>;

Reduction reduction_of(int code) {
  check(code >= 0 && code <= 2, "reduction",
        "expected REDUCTION_NONE (0), REDUCTION_MEAN (1) or REDUCTION_SUM (2), "
        "got " +
            std::to_string(code));
  return static_cast<Reduction>(code);
}

CodeFormat format_of(int code) {
  check(code >= 0 && code <= 7, "format",
        "expected INT8 (0) to MX_E2M1 (7), got " + std::to_string(code));
  return static_cast<CodeFormat>(code);
}

void check_length(const char* name, size_t expected, size_t got) {
  check(expected == got, name,
        "expected a list of " + std::to_string(expected) + ", one per tensor, got " +
            std::to_string(got));
}

std::vector<TensorRef> tensors_of(const Addresses& data, const Sizes& numels, const Codes& dtypes) {
  check_length("numels", data.size(), numels.size());
  check_length("dtypes", data.size(), dtypes.size());
  std::vector<TensorRef> tensors;
  tensors.reserve(data.size());
  for (size_t i = 0; i < data.size(); ++i) {
    tensors.push_back({at(data[i]), numels[i], dtype_of(dtypes[i])});
  }
  return tensors;
}

void bind_norms(py::module_& m, NoGil no_gil) {
  m.def(
      "rms_norm_forward",
      [](Address x, Address weight, Address y, Address rstd, int64_t rows, int64_t hidden,
         double eps, int dtype, int weight_dtype, Address residual, Address total,
         int residual_dtype) {
        rms_norm_forward({at(x),
                          at(weight),
                          at(y),
                          at<float>(rstd),
                          rows,
                          hidden,
                          eps,
                          dtype_of(dtype),
                          dtype_of(weight_dtype),
                          {at(residual), at(total), dtype_of(residual_dtype)}});
      },
      py::arg("x"), py::arg("weight"), py::arg("y"), py::arg("rstd"), py::arg("rows"),
      py::arg("hidden"), py::arg("eps"), py::arg("dtype"), py::arg("weight_dtype"),
      py::arg("residual") = 0, py::arg("total") = 0, py::arg("residual_dtype") = 0, no_gil);
  m.def(
      "rms_norm_backward",
      [](Address grad, Address x, Address weight, Address rstd, Address dx, Address dweight,
         int64_t rows, int64_t hidden, int dtype, int weight_dtype, Address dtotal,
         Address dresidual, int residual_dtype, Address rng, double p, Address row_index,
         int64_t width) {
        rms_norm_backward({at(grad),
                           at(x),
                           at(weight),
                           at<float>(rstd),
                           at(dx),
                           at(dweight),
                           rows,
                           hidden,
                           dtype_of(dtype),
                           dtype_of(weight_dtype),
                           {at(dtotal),
                            at(dresidual),
                            dtype_of(residual_dtype),
                            {at<int64_t>(rng), p, at<int64_t>(row_index), width, 0}}});
      },
      py::arg("grad"), py::arg("x"), py::arg("weight"), py::arg("rstd"), py::arg("dx"),
      py::arg("dweight"), py::arg("rows"), py::arg("hidden"), py::arg("dtype"),
      py::arg("weight_dtype"), py::arg("dtotal") = 0, py::arg("dresidual") = 0,
      py::arg("residual_dtype") = 0, py::arg("rng") = 0, py::arg("p") = 0.0,
      py::arg("row_index") = 0, py::arg("width") = 0, no_gil);
  m.def(
      "layer_norm_forward",
      [](Address x, Address weight, Address bias, Address y, Address mean, Address rstd,
         int64_t rows, int64_t hidden, double eps, int dtype, int weight_dtype, Address residual,
         Address total, int residual_dtype) {
        layer_norm_forward({at(x),
                            at(weight),
                            at(bias),
                            at(y),
                            at<float>(mean),
                            at<float>(rstd),
                            rows,
                            hidden,
                            eps,
                            dtype_of(dtype),
                            dtype_of(weight_dtype),
                            {at(residual), at(total), dtype_of(residual_dtype)}});
      },
      py::arg("x"), py::arg("weight"), py::arg("bias"), py::arg("y"), py::arg("mean"),
      py::arg("rstd"), py::arg("rows"), py::arg("hidden"), py::arg("eps"), py::arg("dtype"),
      py::arg("weight_dtype"), py::arg("residual") = 0, py::arg("total") = 0,
      py::arg("residual_dtype") = 0, no_gil);
  m.def(
      "layer_norm_backward",
      [](Address grad, Address x, Address weight, Address mean, Address rstd, Address dx,
         Address dweight, Address dbias, int64_t rows, int64_t hidden, int dtype, int weight_dtype,
         Address dtotal, Address dresidual, int residual_dtype, Address rng, double p,
         Address row_index, int64_t width) {
        layer_norm_backward({at(grad),
                             at(x),
                             at(weight),
                             at<float>(mean),
                             at<float>(rstd),
                             at(dx),
                             at(dweight),
                             at(dbias),
                             rows,
                             hidden,
                             dtype_of(dtype),
                             dtype_of(weight_dtype),
                             {at(dtotal),
                              at(dresidual),
                              dtype_of(residual_dtype),
                              {at<int64_t>(rng), p, at<int64_t>(row_index), width, 0}}});
      },
      py::arg("grad"), py::arg("x"), py::arg("weight"), py::arg("mean"), py::arg("rstd"),
      py::arg("dx"), py::arg("dweight"), py::arg("dbias"), py::arg("rows"), py::arg("hidden"),
      py::arg("dtype"), py::arg("weight_dtype"), py::arg("dtotal") = 0, py::arg("dresidual") = 0,
      py::arg("residual_dtype") = 0, py::arg("rng") = 0, py::arg("p") = 0.0,
      py::arg("row_index") = 0, py::arg("width") = 0, no_gil);
}

void bind_rope(py::module_& m, NoGil no_gil) {
  m.def(
      "rope",
      [](Address q, Address k, Address cos, Address sin, Address q_out, Address k_out,
         int64_t batch, int64_t seq, int64_t heads, int64_t kv_heads, int64_t head_dim,
         bool interleaved, bool inverse, int dtype) {
        rope({at(q), at(k), at<float>(cos), at<float>(sin), at(q_out), at(k_out), batch, seq, heads,
              kv_heads, head_dim, interleaved, inverse, dtype_of(dtype)});
      },
      py::arg("q"), py::arg("k"), py::arg("cos"), py::arg("sin"), py::arg("q_out"),
      py::arg("k_out"), py::arg("batch"), py::arg("seq"), py::arg("heads"), py::arg("kv_heads"),
      py::arg("head_dim"), py::arg("interleaved"), py::arg("inverse"), py::arg("dtype"), no_gil);
}

void bind_loss(py::module_& m, NoGil no_gil) {
  m.def(
      "cross_entropy_forward",
      [](Address logits, Address target, Address loss, Address lse, int64_t rows, int64_t vocab,
         int64_t ignore_index, double label_smoothing, double z_loss, int reduction, int dtype) {
        cross_entropy_forward({at(logits),
                               at<int64_t>(target),
                               at<float>(loss),
                               at<float>(lse),
                               {rows, vocab, ignore_index, label_smoothing, z_loss,
                                reduction_of(reduction), dtype_of(dtype)}});
      },
      py::arg("logits"), py::arg("target"), py::arg("loss"), py::arg("lse"), py::arg("rows"),
      py::arg("vocab"), py::arg("ignore_index"), py::arg("label_smoothing"), py::arg("z_loss"),
      py::arg("reduction"), py::arg("dtype"), no_gil);
  m.def(
      "cross_entropy_backward",
      [](Address grad, Address logits, Address target, Address lse, Address dlogits, int64_t rows,
         int64_t vocab, int64_t ignore_index, double label_smoothing, double z_loss, int reduction,
         int dtype) {
        cross_entropy_backward({at<float>(grad),
                                at(logits),
                                at<int64_t>(target),
                                at<float>(lse),
                                at(dlogits),
                                {rows, vocab, ignore_index, label_smoothing, z_loss,
                                 reduction_of(reduction), dtype_of(dtype)}});
      },
      py::arg("grad"), py::arg("logits"), py::arg("target"), py::arg("lse"), py::arg("dlogits"),
      py::arg("rows"), py::arg("vocab"), py::arg("ignore_index"), py::arg("label_smoothing"),
      py::arg("z_loss"), py::arg("reduction"), py::arg("dtype"), no_gil);
}

void bind_row_sums(py::module_& m, NoGil no_gil) {
  m.def(
      "sum_rows",
      [](Address x, Address index, Address weights, Address y, int64_t rows, int64_t terms,
         int64_t x_rows, int64_t width, int dtype, int weight_dtype) {
        sum_rows({at(x), at<int64_t>(index), at(weights), at(y), rows, terms, x_rows, width,
                  dtype_of(dtype), dtype_of(weight_dtype)});
      },
      py::arg("x"), py::arg("index"), py::arg("weights"), py::arg("y"), py::arg("rows"),
      py::arg("terms"), py::arg("x_rows"), py::arg("width"), py::arg("dtype"),
      py::arg("weight_dtype"), no_gil);
  m.def(
      "sum_rows_by_index",
      [](Address x, Address index, Address y, int64_t rows, int64_t x_rows, int64_t width,
         int dtype) {
        sum_rows_by_index({at(x), at<int64_t>(index), nullptr, at(y), rows, 1, x_rows, width,
                           dtype_of(dtype), dtype_of(dtype)});
      },
      py::arg("x"), py::arg("index"), py::arg("y"), py::arg("rows"), py::arg("x_rows"),
      py::arg("width"), py::arg("dtype"), no_gil);
  m.def(
      "places_by_expert",
      [](Address experts, Address place, Address choice, Address ends, int64_t count,
         int64_t num_experts) {
        places_by_expert({at<int64_t>(experts), at<int64_t>(place), at<int64_t>(choice),
                          at<int64_t>(ends), count, num_experts});
      },
      py::arg("experts"), py::arg("place"), py::arg("choice"), py::arg("ends"), py::arg("count"),
      py::arg("num_experts"), no_gil);
  m.def(
      "spread_rows",
      [](Address y, Address x, Address index, Address weights, Address dx, Address dweights,
         int64_t rows, int64_t terms, int64_t width, int dtype, int weight_dtype) {
        spread_rows({at(y), at(x), at<int64_t>(index), at(weights), at(dx), at(dweights), rows,
                     terms, width, dtype_of(dtype), dtype_of(weight_dtype)});
      },
      py::arg("y"), py::arg("x"), py::arg("index"), py::arg("weights"), py::arg("dx"),
      py::arg("dweights"), py::arg("rows"), py::arg("terms"), py::arg("width"), py::arg("dtype"),
      py::arg("weight_dtype"), no_gil);
}

void bind_quantization(py::module_& m, NoGil no_gil) {
  m.def(
      "quantize",
      [](Address x, Address rng, Address codes, Address scales, int64_t numel, int64_t block,
         int format, int dtype) {
        quantize({at(x), at<int64_t>(rng), at<uint8_t>(codes), at(scales), numel, block,
                  format_of(format), dtype_of(dtype)});
      },
      py::arg("x"), py::arg("rng"), py::arg("codes"), py::arg("scales"), py::arg("numel"),
      py::arg("block"), py::arg("format"), py::arg("dtype"), no_gil);
  m.def(
      "dequantize",
      [](Address codes, Address scales, Address y, int64_t numel, int64_t block, int format) {
        dequantize({at<uint8_t>(codes), at(scales), at<float>(y), numel, block, format_of(format)});
      },
      py::arg("codes"), py::arg("scales"), py::arg("y"), py::arg("numel"), py::arg("block"),
      py::arg("format"), no_gil);
}

void bind_compression(py::module_& m, NoGil no_gil) {
  m.def(
      "top_k",
      [](Address x, Address y, Address indices, int64_t rows, int64_t width, int64_t count,
         int dtype) {
        top_k({at(x), at(y), at<int64_t>(indices), rows, width, count, dtype_of(dtype)});
      },
      py::arg("x"), py::arg("y"), py::arg("indices"), py::arg("rows"), py::arg("width"),
      py::arg("count"), py::arg("dtype"), no_gil);
  m.def(
      "hadamard",
      [](Address x, Address y, int64_t numel, int64_t block, int dtype) {
        hadamard({at(x), at(y), numel, block, dtype_of(dtype)});
      },
      py::arg("x"), py::arg("y"), py::arg("numel"), py::arg("block"), py::arg("dtype"), no_gil);
}

// The lists of one call of an update rule, as tensors. A list of states may be empty.
Update update_of(const Addresses& params, const Addresses& grads, const Addresses& first_states,
                 const Addresses& second_states, const Addresses& low_precision,
                 const Sizes& numels, const Codes& param_dtypes, const Codes& grad_dtypes,
                 const Codes& low_dtypes, Address lr, Address step, Address scale, Address clip,
                 Address found_inf, const Addresses& first_scales, const Addresses& second_scales) {
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

void bind_updates(py::module_& m, NoGil no_gil) {
  py::class_<Update>(m, "Update")
      .def(py::init(&update_of), py::kw_only(), py::arg("params"), py::arg("grads"),
           py::arg("first_states"), py::arg("second_states"), py::arg("low_precision"),
           py::arg("numels"), py::arg("param_dtypes"), py::arg("grad_dtypes"),
           py::arg("low_dtypes"), py::arg("lr"), py::arg("step"), py::arg("scale"), py::arg("clip"),
           py::arg("found_inf"), py::arg("first_scales") = Addresses{},
           py::arg("second_scales") = Addresses{});
  const auto bind_adamw = [&](const char* name, auto step) {
    m.def(
        name,
        [step](const Update& update, double beta1, double beta2, double eps, double weight_decay) {
          step(update, {beta1, beta2, eps, weight_decay});
        },
        py::arg("update"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"),
        py::arg("weight_decay"), no_gil);
  };
  bind_adamw("adamw", &adamw);
  bind_adamw("adamw_8bit", &adamw_8bit);
  m.def(
      "sgd",
      [](const Update& update, double momentum, bool nesterov, double weight_decay,
         bool decoupled) { sgd(update, {momentum, nesterov, weight_decay, decoupled}); },
      py::arg("update"), py::arg("momentum"), py::arg("nesterov"), py::arg("weight_decay"),
      py::arg("decoupled"), no_gil);
  m.def(
      "lion",
      [](const Update& update, double beta1, double beta2, double weight_decay) {
        lion(update, {beta1, beta2, weight_decay});
      },
      py::arg("update"), py::arg("beta1"), py::arg("beta2"), py::arg("weight_decay"), no_gil);
  m.def(
      "lamb",
      [](const Update& update, Address trust, Address correction1, Address correction2,
         double beta1, double beta2, double eps, double weight_decay) {
        lamb(update,
             {beta1, beta2, eps, weight_decay, at<float>(correction1), at<float>(correction2)},
             at<float>(trust));
      },
      py::arg("update"), py::arg("trust"), py::arg("correction1"), py::arg("correction2"),
      py::arg("beta1"), py::arg("beta2"), py::arg("eps"), py::arg("weight_decay"), no_gil);
  m.def(
      "lamb_sums_of_squares",
      [](const Update& update, Address out, Address correction1, Address correction2, double beta1,
         double beta2, double eps, double weight_decay) {
        lamb_sums_of_squares(
            update,
            {beta1, beta2, eps, weight_decay, at<float>(correction1), at<float>(correction2)},
            at<int64_t>(out));
      },
      py::arg("update"), py::arg("out"), py::arg("correction1"), py::arg("correction2"),
      py::arg("beta1"), py::arg("beta2"), py::arg("eps"), py::arg("weight_decay"), no_gil);
}

void bind_lists(py::module_& m, NoGil no_gil) {
  m.def(
      "sums_of_squares",
      [](const Addresses& tensors, const Sizes& numels, const Codes& dtypes, Address out) {
        sums_of_squares(tensors_of(tensors, numels, dtypes), at<int64_t>(out));
      },
      py::arg("tensors"), py::arg("numels"), py::arg("dtypes"), py::arg("out"), no_gil);
  m.def(
      "l2_norm",
      [](const Addresses& tensors, const Sizes& numels, const Codes& dtypes, Address out) {
        l2_norm(tensors_of(tensors, numels, dtypes), at<float>(out));
      },
      py::arg("tensors"), py::arg("numels"), py::arg("dtypes"), py::arg("out"), no_gil);
  m.def(
      "clip",
      [](const Addresses& tensors, const Sizes& numels, const Codes& dtypes, Address norm,
         double max_norm) { clip(tensors_of(tensors, numels, dtypes), at<float>(norm), max_norm); },
      py::arg("tensors"), py::arg("numels"), py::arg("dtypes"), py::arg("norm"),
      py::arg("max_norm"), no_gil);
  m.def(
      "unscale_and_check",
      [](const Addresses& grads, const Sizes& numels, const Codes& dtypes, Address scale,
         Address found_inf) {
        unscale_and_check(tensors_of(grads, numels, dtypes), at<float>(scale),
                          at<float>(found_inf));
      },
      py::arg("grads"), py::arg("numels"), py::arg("dtypes"), py::arg("scale"),
      py::arg("found_inf"), no_gil);
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

void bind_information(py::module_& m) {
  m.attr("FLOAT32") = static_cast<int>(DType::kFloat32);
  m.attr("BFLOAT16") = static_cast<int>(DType::kBFloat16);
  m.attr("FLOAT16") = static_cast<int>(DType::kFloat16);
  const char* formats[] = {"INT8", "INT4", "NF4", "E4M3", "E5M2", "MX_E4M3", "MX_E5M2", "MX_E2M1"};
  for (int code = 0; code < 8; ++code) m.attr(formats[code]) = code;
  m.attr("REDUCTION_NONE") = static_cast<int>(Reduction::kNone);
  m.attr("REDUCTION_MEAN") = static_cast<int>(Reduction::kMean);
  m.attr("REDUCTION_SUM") = static_cast<int>(Reduction::kSum);
  m.def("philox", &philox, py::arg("seed"), py::arg("offset"), py::arg("nwords"));
  m.def("set_isa", &set_isa, py::arg("name"));
  m.def("available_isas", &available_isas);
  m.def("num_threads", &num_threads);
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
  const NoGil no_gil;
  bind_norms(m, no_gil);
  bind_elementwise(m, no_gil);
  bind_rope(m, no_gil);
  bind_loss(m, no_gil);
  bind_row_sums(m, no_gil);
  bind_quantization(m, no_gil);
  bind_compression(m, no_gil);
  bind_updates(m, no_gil);
  bind_lists(m, no_gil);
  bind_information(m);
}

}  // namespace anychip::cpu
