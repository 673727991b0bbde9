// Calls with a tensor that no kernel takes: on a device without kernels, or of a layout that is not dense.
#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

namespace scaledot {

// Throws NotImplementedError: `query: got a tensor on xpu:0; needs cpu or cuda: move it with query.cpu()`.
// `devices`: which have kernels. `advice`: what to do about it, in words.
[[noreturn]] void refuse_device(const at::Tensor& tensor, std::string_view name, std::string_view devices,
                                std::string_view advice);

}  // namespace scaledot
