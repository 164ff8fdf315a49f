// A CUDA device for the CPU build of PyTorch, as far as tensors without content (FakeTensorMode)
// need one: autograd's engine asks for a device guard and for "the accelerator", and attention asks
// which kernel a GPU would take. Loaded before torch, so that getAccelerator is found here first.

#include <ATen/DeviceAccelerator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/FakeGuardImpl.h>

using Guard = c10::impl::FakeGuardImpl<c10::DeviceType::CUDA>;
template <>
thread_local c10::DeviceIndex Guard::current_device_ = 0;
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

namespace at {
struct CUDAHooks : CUDAHooksInterface {
  CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
} // namespace at

namespace at::accelerator {
std::optional<c10::DeviceType> getAccelerator(bool) {
  return c10::DeviceType::CUDA;
}
} // namespace at::accelerator

namespace at::native {
// The rules of aten/src/ATen/native/transformers/cuda/sdp_utils.cpp that matter here: flash takes
// half precision without a mask; memory-efficient takes masks, but no shared heads of keys.
static int64_t choose(const Tensor& q, const Tensor& k, const Tensor&, const std::optional<Tensor>& mask,
                      double, bool, std::optional<double>, bool enable_gqa) {
  enum { math = 0, flash = 1, efficient = 2 };
  if (!mask && q.scalar_type() != at::kFloat)
    return flash;
  return enable_gqa ? math : efficient;
}
REGISTER_CUDA_DISPATCH(_fused_sdp_choice_stub, &choose)
} // namespace at::native
