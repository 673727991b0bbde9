// The tensor arguments of an op, from one list. A struct of inputs declares each argument twice, side by side: as a
// member, with what it means and what it means if it is missing, and as a row of rows(), in the order of the members:
//
//   const OptionalTensor& attn_mask = kNoTensor;
//   input<Differentiable::yes>("attn_mask", attn_mask)
//
// The schemas, what a graph node saves, the checks of layouts, devices and storages, and all that concerns gradients
// follow. rows() is a function because the members are references, which C++ has no pointers to.
#pragma once

#include "ops/common/op.h"

namespace scaledot {

inline const OptionalTensor kNoTensor;

enum class Differentiable : bool { no, yes };

template <class Member, Differentiable gradient>
struct Input {
  static constexpr bool is_optional = std::is_same_v<Member, OptionalTensor>;
  static constexpr bool has_gradient = gradient == Differentiable::yes;
  const char* name;
  const Member& tensor;
  const char* argument;  // what callers of the functions know it as, for errors
};

template <Differentiable gradient = Differentiable::no, class Member>
Input<Member, gradient> input(const char* name, const Member& tensor, const char* argument = nullptr) {
  return {name, tensor, argument ? argument : name};
}

template <class Inputs>
using Rows = decltype(std::declval<const Inputs&>().rows());
template <class Inputs>
constexpr size_t kInputCount = std::tuple_size_v<Rows<Inputs>>;

// The places of the inputs that have a gradient: the order of a backward's results and of output_mask.
template <class Inputs>
constexpr auto kDifferentiable = []<class... Row>(std::type_identity<std::tuple<Row...>>) {
  std::array<size_t, (size_t(Row::has_gradient) + ...)> places{};
  size_t place = 0, next = 0;
  ((Row::has_gradient ? void(places[next++] = place++) : void(++place)), ...);
  return places;
}(std::type_identity<Rows<Inputs>>());
template <class Inputs>
constexpr size_t kGradients = kDifferentiable<Inputs>.size();

template <class Inputs, class Visit>
void for_each_input(const Inputs& inputs, const Visit& visit) {
  std::apply([&](const auto&... row) { (visit(row), ...); }, inputs.rows());
}

inline const Tensor* present(const Tensor& tensor) { return tensor.defined() ? &tensor : nullptr; }
inline const Tensor* present(const OptionalTensor& tensor) {
  return tensor.has_value() && tensor->defined() ? &*tensor : nullptr;
}
inline OptionalTensor optional(Tensor tensor) {
  return tensor.defined() ? OptionalTensor(std::move(tensor)) : std::nullopt;
}

// ---------------------------------------------------------------------------------------------------- as tuples
// References to all of them, or to those that have a gradient.
template <class Inputs>
auto all_of(const Inputs& inputs) {
  return std::apply([](const auto&... row) { return std::tie(row.tensor...); }, inputs.rows());
}
template <class Inputs>
auto differentiable_of(const Inputs& inputs) {
  const auto selected = [](const auto& row) {
    if constexpr (std::remove_cvref_t<decltype(row)>::has_gradient) {
      return std::tie(row.tensor);
    } else {
      return std::tuple<>();
    }
  };
  return std::apply([&](const auto&... row) { return std::tuple_cat(selected(row)...); }, inputs.rows());
}

// The inputs with others for the first three.
template <class Inputs>
Inputs with_qkv(const Inputs& inputs, const Tensor& query, const Tensor& key, const Tensor& value) {
  return [&]<size_t... k>(std::index_sequence<k...>)->Inputs {
    const auto all = all_of(inputs);
    return {query, key, value, std::get<3 + k>(all)...};
  }
  (std::make_index_sequence<kInputCount<Inputs> - 3>());
}

// ---------------------------------------------------------------------------------------------------- as an array
template <class Inputs>
using InputTensors = std::array<Tensor, kInputCount<Inputs>>;  // undefined where one is missing

template <class Inputs>
InputTensors<Inputs> tensors_of(const Inputs& inputs) {
  InputTensors<Inputs> tensors;
  auto next = tensors.begin();
  for_each_input(inputs, [&](const auto& row) {
    if (const Tensor* tensor = present(row.tensor)) *next = *tensor;
    ++next;
  });
  return tensors;
}

// Inputs from an array that begins with their tensors, and that outlives this.
template <class Inputs>
class InputsOf {
  template <size_t k, class Tensors>
  const auto& member(const Tensors& tensors) const {
    if constexpr (std::tuple_element_t<k, Rows<Inputs>>::is_optional) {
      return optional_[k];
    } else {
      return tensors[k];
    }
  }
  template <class Tensors, size_t... k>
  InputsOf(const Tensors& tensors, std::index_sequence<k...>)
      : optional_{optional(std::tuple_element_t<k, Rows<Inputs>>::is_optional ? tensors[k] : Tensor())...},
        inputs{member<k>(tensors)...} {}

  const std::array<OptionalTensor, kInputCount<Inputs>> optional_;

 public:
  template <class Tensors>
  explicit InputsOf(const Tensors& tensors) : InputsOf(tensors, std::make_index_sequence<kInputCount<Inputs>>()) {}
  InputsOf(const InputsOf&) = delete;

  const Inputs inputs;
};

// ---------------------------------------------------------------------------------------------------- schemas
// Inputs of no tensors, to ask for their names.
template <class Inputs>
const Inputs& no_inputs() {
  static const InputTensors<Inputs> none;
  static const InputsOf<Inputs> inputs(none);
  return inputs.inputs;
}

// "Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, ..."
template <class Inputs>
std::string input_schema(Defaults defaults) {
  std::string schema;
  for_each_input(no_inputs<Inputs>(), [&](const auto& row) {
    schema += std::string(schema.empty() ? "" : ", ") + (row.is_optional ? "Tensor? " : "Tensor ") + row.name;
    if (row.is_optional && defaults == Defaults::yes) schema += "=None";
  });
  return schema;
}

// "(Tensor grad_query, ...)", the results of a backward, and "bool[n] output_mask", which of them are asked for.
template <class Inputs>
std::string gradient_schema() {
  std::string schema;
  for_each_input(no_inputs<Inputs>(), [&](const auto& row) {
    if (row.has_gradient) schema += std::string(schema.empty() ? "(" : ", ") + "Tensor grad_" + row.name;
  });
  return schema + ")";
}
template <class Inputs>
std::string output_mask_schema() {
  return "bool[" + std::to_string(kGradients<Inputs>) + "] output_mask";
}
template <class Inputs>
using OutputMask = std::array<bool, kGradients<Inputs>>;

template <class Tensors>
struct AsTuple;
template <size_t... k>
struct AsTuple<std::index_sequence<k...>> {
  template <size_t>
  using One = Tensor;
  using Type = std::tuple<One<k>...>;
};
template <class Inputs>
using Gradients = typename AsTuple<std::make_index_sequence<kGradients<Inputs>>>::Type;  // of a backward

}  // namespace scaledot
