// The module scaledot._C: what Python asks the library that is not an op. It includes no torch header.
#include <pybind11/pybind11.h>

#include <sstream>
#include <string>

#include "build_info.h"
#include "core/kernel.h"
#include "cuda/kernel.h"

namespace py = pybind11;

namespace {

py::list split(const std::string& semicolons) {
  py::list items;
  std::istringstream stream(semicolons);
  for (std::string item; std::getline(stream, item, ';');) items.append(item);
  return items;
}

py::list kernel_names() {
  py::list names;
  const scaledot::KernelTable table = scaledot::cpu_kernels();
  for (int k = 0; k < table.count; ++k) names.append(table.kernels[k].name);
  return names;
}

py::dict build_info() {
  py::dict info;
  info["version"] = SCALEDOT_VERSION;
  info["torch"] = SCALEDOT_TORCH_VERSION;
  info["compiler"] = SCALEDOT_COMPILER;
  info["build_type"] = SCALEDOT_BUILD_TYPE;
  info["cpu_kernels"] = kernel_names();
  info["cuda_archs"] = split(SCALEDOT_CUDA_ARCHS);
#if defined(SCALEDOT_CUDA)
  info["cuda_status"] = scaledot::kCudaStatus;
#else
  info["cuda_status"] = py::none();
#endif
  info["cuda"] = *SCALEDOT_CUDA_VERSION ? py::object(py::str(SCALEDOT_CUDA_VERSION)) : py::none();
  return info;
}

void force_kernel(const py::object& name) {
  const std::string wanted = name.is_none() ? "" : name.cast<std::string>();
  if (!scaledot::force_kernel(name.is_none() ? nullptr : wanted.c_str()))
    throw py::value_error("name: no kernel is called '" + wanted + "'; there are " +
                          py::str(kernel_names()).cast<std::string>());
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.def("build_info", build_info);
  module.def("cpu_capability", scaledot::cpu_capability);
  module.def("kernel_names", kernel_names);
  module.def("force_kernel", force_kernel, py::arg("name").none(true));
}
