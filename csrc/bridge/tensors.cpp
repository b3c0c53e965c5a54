// Tensors of the device: making, viewing, resizing, and copies to, from and inside it.

#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/conj_physical.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/neg.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <mutex>

#include "bridge.h"

namespace anychip_bridge {
namespace {

using at::Tensor;
using c10::IntArrayRef;
using c10::ScalarType;
template <class T>
using Maybe = std::optional<T>;

constexpr int64_t kMaxRuns = 1024;
constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

c10::Device placed(Maybe<c10::Device> device) {
  const auto index = device && device->has_index() ? device->index() : current_device();
  return {kChip, index};
}

Tensor empty_memory_format(IntArrayRef sizes, Maybe<ScalarType> dtype, Maybe<c10::Layout>,
                           Maybe<c10::Device> device, Maybe<bool> is_pinned,
                           Maybe<c10::MemoryFormat> format) {
  TORCH_CHECK(!is_pinned.value_or(false), "only tensors of the host can be pinned");
  const c10::DeviceGuard guard(placed(device));
  return at::detail::empty_generic(sizes, allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(IntArrayRef sizes, IntArrayRef strides, Maybe<ScalarType> dtype,
                     Maybe<c10::Layout>, Maybe<c10::Device> device, Maybe<bool> is_pinned) {
  TORCH_CHECK(!is_pinned.value_or(false), "only tensors of the host can be pinned");
  const c10::DeviceGuard guard(placed(device));
  return at::detail::empty_strided_generic(sizes, strides, allocator(), kKeys,
                                           c10::dtype_or_default(dtype));
}

// ---- copies. Those of pageable host memory are over when they return, as in every adapter.

void upload(c10::DeviceIndex device, Place to, const void* from, uint64_t nbytes) {
  const auto status =
      chip.host_to_device(device, to.memory, to.offset, from, nbytes, current_stream(device));
  check(status, "host_to_device", device);
}

void download(c10::DeviceIndex device, void* to, Place from, uint64_t nbytes) {
  const auto status =
      chip.device_to_host(device, to, from.memory, from.offset, nbytes, current_stream(device));
  check(status, "device_to_host", device);
}

void finish(c10::DeviceIndex device) { synchronize_stream(device, current_stream(device)); }

// Elements that lie one after the other, seen in the order of the tensor's indices.
struct Runs {
  explicit Runs(const Tensor& of) : tensor(of), outer(of.dim()) {
    while (outer > 0 && (of.size(outer - 1) == 1 || of.stride(outer - 1) == length))
      length *= of.size(--outer);
    for (int64_t dim = 0; dim < outer; ++dim) count *= of.size(dim);
  }
  // Calls visit(number of the run, its offset in the tensor in bytes).
  template <class Visit>
  void each(Visit&& visit) const {
    std::vector<int64_t> index(outer, 0);
    for (int64_t number = 0; number < count; ++number) {
      int64_t offset = 0;
      for (int64_t dim = 0; dim < outer; ++dim) offset += index[dim] * tensor.stride(dim);
      visit(number, offset * static_cast<int64_t>(tensor.element_size()));
      for (int64_t dim = outer - 1; dim >= 0 && ++index[dim] == tensor.size(dim); --dim)
        index[dim] = 0;
    }
  }
  uint64_t nbytes() const { return length * tensor.element_size(); }
  const Tensor& tensor;
  int64_t outer, length = 1, count = 1;
};

// Bytes from a tensor's first element to the end of its last one.
uint64_t span_of(const Tensor& tensor) {
  return at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.element_size());
}

Tensor flat_on_host(uint64_t nbytes, const Tensor& like) {
  const auto count = static_cast<int64_t>(nbytes / like.element_size());
  return at::empty({count}, at::TensorOptions().dtype(like.scalar_type()));
}

Tensor strided_on_host(const Tensor& like) {
  return at::empty_strided(like.sizes(), like.strides(),
                           at::TensorOptions().dtype(like.scalar_type()));
}

// target[...] = values, which have its shape and dtype.
void write(const Tensor& target, const Tensor& values) {
  if (target.numel() == 0) return;
  const auto device = target.device().index();
  const auto place = place_of(target);
  if (target.is_non_overlapping_and_dense()) {
    Tensor host = values;
    if (values.strides() != target.strides()) host = strided_on_host(target).copy_(values);
    upload(device, place, host.data_ptr(), target.numel() * target.element_size());
    return finish(device);
  }
  const Runs runs(target);
  if (runs.count <= kMaxRuns) {
    const Tensor host = values.contiguous();
    const auto* bytes = static_cast<const char*>(host.data_ptr());
    runs.each([&](int64_t number, int64_t offset) {
      upload(device, {place.memory, place.offset + offset}, bytes + number * runs.nbytes(),
             runs.nbytes());
    });
    return finish(device);
  }
  // What lies between is read and written again; two threads must not do so at once.
  static auto* mutex = new std::mutex;
  std::lock_guard<std::mutex> lock(*mutex);
  Tensor host = flat_on_host(span_of(target), target);
  download(device, host.data_ptr(), place, host.nbytes());
  finish(device);
  host.as_strided(target.sizes(), target.strides()).copy_(values);
  upload(device, place, host.data_ptr(), host.nbytes());
  finish(device);
}

// The elements as they lie there: a conjugate or negative view's are those of its base.
Tensor read(const Tensor& source) {
  const auto device = source.device().index();
  if (source.numel() == 0) return at::empty(source.sizes(), source.options().device(at::kCPU));
  const auto place = place_of(source);
  if (source.is_non_overlapping_and_dense()) {
    Tensor host = strided_on_host(source);
    download(device, host.data_ptr(), place, source.numel() * source.element_size());
    finish(device);
    return host;
  }
  const Runs runs(source);
  if (runs.count <= kMaxRuns) {
    Tensor host = at::empty(source.sizes(), at::TensorOptions().dtype(source.scalar_type()));
    auto* bytes = static_cast<char*>(host.data_ptr());
    runs.each([&](int64_t number, int64_t offset) {
      download(device, bytes + number * runs.nbytes(), {place.memory, place.offset + offset},
               runs.nbytes());
    });
    finish(device);
    return host;
  }
  Tensor host = flat_on_host(span_of(source), source);
  download(device, host.data_ptr(), place, host.nbytes());
  finish(device);
  return host.as_strided(source.sizes(), source.strides());
}

bool same_bits(const Tensor& a, const Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.is_conj() == b.is_conj() &&
         a.is_neg() == b.is_neg();
}

// Elements that lie alike in both, without gaps: one copy of bytes.
bool same_layout(const Tensor& a, const Tensor& b) {
  return same_bits(a, b) && a.sizes() == b.sizes() && a.strides() == b.strides() &&
         a.is_non_overlapping_and_dense();
}

// A copy between the device and page-locked memory that goes on after the call.
bool copied_behind(const Tensor& target, const Tensor& source) {
  const Tensor &host = target.is_cpu() ? target : source,
               &there = target.is_cpu() ? source : target;
  if (!same_layout(target, source) || !is_pinned(host.data_ptr())) return false;
  const auto device = there.device().index();
  if (target.is_cpu())
    download(device, host.data_ptr(), place_of(there), host.nbytes());
  else
    upload(device, place_of(there), host.data_ptr(), host.nbytes());
  record_pinned(host.data_ptr(), device, current_stream(device));
  return true;
}

// The source's elements, as they are to lie in the target.
Tensor resolved(const Tensor& source, const Tensor& target) {
  Tensor values = source.is_cpu() ? source.resolve_conj().resolve_neg() : read(source);
  if ((!source.is_cpu() && source.is_conj()) != target.is_conj())
    values = at::conj_physical(values);
  if ((!source.is_cpu() && source.is_neg()) != target.is_neg()) values = at::neg(values);
  return values.to(target.scalar_type());
}

Tensor copy_from(const Tensor& from, const Tensor& target, bool non_blocking) {
  if (target.numel() == 0) return target;
  const Tensor source = from.sizes() == target.sizes() ? from : from.expand(target.sizes());
  const int64_t nbytes = target.numel() * target.element_size();
  if (source.is_cpu() || target.is_cpu()) {
    const Timed timed("copy", target.is_cpu() ? "to the host" : "to the device",
                      (target.is_cpu() ? source : target).device().index(), nbytes);
    if (non_blocking && copied_behind(target, source)) return target;
    if (target.is_cpu() && same_layout(target, source)) {
      const auto device = source.device().index();
      download(device, target.mutable_data_ptr(), place_of(source), nbytes);
      finish(device);
    } else if (target.is_cpu())
      target.copy_(resolved(source, at::empty({0}, at::dtype(source.scalar_type()))));
    else
      write(target, resolved(source, target));
    return target;
  }
  if (source.device() == target.device()) {
    static auto& native = call_count("aten::_copy_from", true);
    if (same_layout(target, source)) {
      static auto& by_host = call_count("aten::_copy_from", false);
      const bool is_native = chip.device_to_device != nullptr;
      const Timed timed(is_native ? "native" : "host", "copy", target.device().index(),
                        is_native ? 0 : 2 * nbytes);
      copy_on_device(target.device().index(), place_of(target), place_of(source), nbytes);
      return ++(is_native ? native : by_host), target;
    }
    if (source.is_conj() == target.is_conj() && source.is_neg() == target.is_neg() &&
        native_copy(target, source))
      return ++native, target;
  }
  ++call_count("aten::_copy_from", false);
  const Timed timed("host", "aten::_copy_from", target.device().index(), 2 * nbytes);
  write(target, resolved(source, target));
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  if (target.sizes() != source.sizes()) target.resize_(source.sizes());
  return copy_from(source, target, false);
}

c10::Scalar local_scalar(const Tensor& tensor) {
  const Timed timed("copy", "of a number to the host", tensor.device().index(), tensor.nbytes());
  return read(tensor).item();
}

// ---- views: of the shape alone

Tensor as_strided(const Tensor& self, IntArrayRef sizes, IntArrayRef strides,
                  Maybe<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, sizes, strides, offset);
}
Tensor view(const Tensor& self, IntArrayRef sizes) { return at::native::view(self, sizes); }
Tensor reshape_alias(const Tensor& self, IntArrayRef sizes, IntArrayRef strides) {
  return at::native::_reshape_alias(self, sizes, strides);
}
Tensor unfold(const Tensor& self, int64_t dim, int64_t size, int64_t step) {
  return at::native::unfold(self, dim, size, step);
}
Tensor view_as_real(const Tensor& self) { return at::native::view_as_real(self); }
Tensor view_as_complex(const Tensor& self) { return at::native::view_as_complex(self); }

// ---- storages

void reserve(const c10::Storage& storage, uint64_t nbytes) {
  if (nbytes > storage.nbytes())
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(storage, nbytes);
}

const Tensor& resize_(const Tensor& self, IntArrayRef sizes, Maybe<c10::MemoryFormat> format) {
  if (self.sizes() != sizes) {
    auto* impl = self.unsafeGetTensorImpl();
    reserve(self.storage(), at::detail::computeStorageNbytesContiguous(sizes, self.element_size(),
                                                                       self.storage_offset()));
    impl->set_sizes_contiguous(sizes);
  }
  if (format) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return at::native::set_tensor_(self, source);
}
Tensor& set_view(Tensor& self, at::Storage storage, int64_t offset, IntArrayRef sizes,
                 IntArrayRef strides) {
  const auto itemsize = self.element_size();
  reserve(storage, strides.size() == sizes.size()
                       ? at::detail::computeStorageNbytes(sizes, strides, itemsize, offset)
                       : at::detail::computeStorageNbytesContiguous(sizes, itemsize, offset));
  return at::native::set_storage_cpu_(self, std::move(storage), offset, sizes, strides);
}
Tensor& set_storage(Tensor& self, at::Storage storage) {
  return at::native::set_(self, std::move(storage));
}
Tensor& set_empty(Tensor& self) { return set_tensor(self, at::empty({0}, self.options())); }

// Whether `self.data = from` may be: module.to(device) then keeps parameters that are tied. torch's
// own list of dense devices leaves the private one out.
bool is_compatible(const Tensor& self, const Tensor& from) {
  const auto is_plain = [](const Tensor& x) {
    return x.layout() == c10::kStrided && (x.is_cpu() || x.device().type() == kChip);
  };
  return self.key_set() == from.key_set() || (is_plain(self) && is_plain(from));
}

void record_stream(Tensor& self, c10::Stream stream) {
  allocator()->recordStream(self.storage().data_ptr(), stream);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty_memory_format);
  library.impl("empty_strided", empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar);
  library.impl("as_strided", as_strided);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("unfold", unfold);
  library.impl("view_as_real", view_as_real);
  library.impl("view_as_complex", view_as_complex);
  library.impl("resize_", resize_);
  library.impl("set_", set_empty);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_.source_Storage", set_storage);
  library.impl("set_.source_Storage_storage_offset", set_view);
  library.impl("_has_compatible_shallow_copy_type", is_compatible);
  library.impl("record_stream", record_stream);
}

// copy_from knows of conjugate and negative views; to resolve them before would be a copy again.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

}  // namespace

Tensor empty_strided_on(c10::Device device, IntArrayRef sizes, IntArrayRef strides,
                        ScalarType dtype) {
  return empty_strided(sizes, strides, dtype, {}, device, {});
}

Tensor to_host(const Tensor& tensor) { return tensor.to(at::kCPU).contiguous(); }

}  // namespace anychip_bridge
