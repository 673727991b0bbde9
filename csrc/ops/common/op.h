// How the arguments of an op, which the dispatcher passes one by one, become one struct, and how they are spread again.
//
// An op is described by a struct with
//   kName     SCALEDOT_OP("sdpa"), its name in the dispatcher
//   kOps      which options of ops/common/options.h it has
//   Args      an aggregate: what the schema has before the options, `AttentionOptions options`, what it has after them;
//             before() and after() return these members as a tuple of references, in the schema's order
//   Result    what it returns
//
// The tensors in Args are references: an Args lives only as long as the call that it was made for.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/OptionalArrayRef.h>

#include <array>
#include <string_view>
#include <type_traits>
#include <utility>

#include "ops/common/options.h"

namespace scaledot {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Tensor2 = std::tuple<Tensor, Tensor>;
using Tensor3 = std::tuple<Tensor, Tensor, Tensor>;
using Tensor4 = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// ---------------------------------------------------------------------------------------------------- types
// Says of a member of an Args which type the dispatcher passes it as (Argument). For options it has the schema's name
// of the type, the argument made from a member, and the member made from an argument.
template <class Member>
struct SchemaType {
  using Argument = Member;
  static const Member& argument(const Member& member) { return member; }
  static const Member& member(const Member& argument) { return argument; }
  static const char* name() {
    if (std::is_same_v<Member, bool>) return "bool";
    if (std::is_same_v<Member, double>) return "float";
    if (std::is_same_v<Member, std::optional<double>>) return "float?";
    if (std::is_same_v<Member, std::optional<c10::SymInt>>) return "SymInt?";
    return nullptr;
  }
};
template <>
struct SchemaType<Tensor> {
  using Argument = const Tensor&;
};
template <>
struct SchemaType<OptionalTensor> {
  using Argument = const OptionalTensor&;
  static Argument argument(const OptionalTensor& member) { return member; }
  static Argument member(Argument argument) { return argument; }
};
template <>
struct SchemaType<std::string> {
  using Argument = std::string_view;
  static std::string_view argument(const std::string& member) { return member; }
  static std::string member(std::string_view argument) { return std::string(argument); }
  static const char* name() { return "str"; }
};
// None stands for no numbers: AOTInductor cannot pass an op an empty list.
template <>
struct SchemaType<std::vector<c10::SymInt>> {
  using Argument = c10::OptionalArrayRef<c10::SymInt>;
  static Argument argument(const std::vector<c10::SymInt>& member) {
    return member.empty() ? Argument() : Argument(member);
  }
  static std::vector<c10::SymInt> member(const Argument& argument) {
    return argument ? argument->vec() : std::vector<c10::SymInt>();
  }
  static const char* name() { return "SymInt[]?"; }
};

template <class Row>
using OptionType = std::remove_cvref_t<decltype(std::declval<AttentionOptions>().*Row::member)>;

// ---------------------------------------------------------------------------------------------------- options
// The rows of kOptions that the ops have.
template <unsigned ops>
constexpr auto option_rows() {
  return std::apply(
      [](const auto&... row) {
        const auto selected = [](const auto& one) {
          if constexpr ((std::remove_cvref_t<decltype(one)>::ops & ops) != 0) {
            return std::tuple(one);
          } else {
            return std::tuple<>();
          }
        };
        return std::tuple_cat(selected(row)...);
      },
      kOptions);
}

// Calls visit(row, value) for each option that the ops have.
template <unsigned ops, class Options, class Visit>
void for_each_option(Options& options, const Visit& visit) {
  std::apply([&](const auto&... row) { (visit(row, options.*std::remove_cvref_t<decltype(row)>::member), ...); },
             option_rows<ops>());
}

// The options as the dispatcher passes them.
template <unsigned ops>
auto option_arguments(const AttentionOptions& options) {
  return std::apply(
      [&](const auto&... row) {
        return std::tuple<typename SchemaType<OptionType<std::remove_cvref_t<decltype(row)>>>::Argument...>(
            SchemaType<OptionType<std::remove_cvref_t<decltype(row)>>>::argument(
                options.*std::remove_cvref_t<decltype(row)>::member)...);
      },
      option_rows<ops>());
}

// ", float dropout_p=0.0, bool is_causal=False, ..." of a schema; the backward's arguments have no defaults.
enum class Defaults : bool { no, yes };
template <unsigned ops>
std::string option_schema(const AttentionOptions& defaults, Defaults with) {
  const auto text = [](const auto& value) -> std::string {
    using Type = std::remove_cvref_t<decltype(value)>;
    if constexpr (std::is_same_v<Type, bool>) return value ? "True" : "False";
    if constexpr (std::is_same_v<Type, double>) return std::to_string(value);
    if constexpr (std::is_same_v<Type, std::string>) return "\"" + value + "\"";
    return "None";
  };
  std::string schema;
  for_each_option<ops>(defaults, [&](const auto& row, const auto& value) {
    schema += std::string(", ") + SchemaType<std::remove_cvref_t<decltype(value)>>::name() + " " + row.name;
    if (with == Defaults::yes) schema += "=" + text(value);
  });
  return schema;
}

// ---------------------------------------------------------------------------------------------------- one op
template <class Op>
struct Spread {
  using Args = typename Op::Args;
  using Before = decltype(std::declval<const Args&>().before());
  using After = decltype(std::declval<const Args&>().after());

  template <class Tuple>
  struct Arguments;
  template <class... Member>
  struct Arguments<std::tuple<Member...>> {
    using Types = std::tuple<typename SchemaType<std::remove_cvref_t<Member>>::Argument...>;
  };
  using Types = decltype(std::tuple_cat(std::declval<typename Arguments<Before>::Types>(),
                                        option_arguments<Op::kOps>(std::declval<const AttentionOptions&>()),
                                        std::declval<typename Arguments<After>::Types>()));
  template <class Tuple>
  struct Function;
  template <class... Argument>
  struct Function<std::tuple<Argument...>> {
    using Type = typename Op::Result(Argument...);
  };
  using Signature = typename Function<Types>::Type;

  static auto arguments(const Args& args) {
    return std::tuple_cat(args.before(), option_arguments<Op::kOps>(args.options), spread(args.after()));
  }

  template <class Tuple>
  static Args gather(const Tuple& arguments) {
    constexpr auto rows = option_rows<Op::kOps>();
    return gather(arguments, std::make_index_sequence<std::tuple_size_v<Before>>(),
                  std::make_index_sequence<std::tuple_size_v<decltype(rows)>>(),
                  std::make_index_sequence<std::tuple_size_v<After>>());
  }

 private:
  template <class... Member>
  static auto spread(const std::tuple<Member&...>& members) {
    return std::apply(
        [](const auto&... member) {
          return std::tuple<typename SchemaType<std::remove_cvref_t<Member>>::Argument...>(
              SchemaType<std::remove_cvref_t<Member>>::argument(member)...);
        },
        members);
  }

  // The nested aggregates of Args take their members one after the other.
  template <class Tuple, size_t... before, size_t... option, size_t... after>
  static Args gather(const Tuple& arguments, std::index_sequence<before...>, std::index_sequence<option...>,
                     std::index_sequence<after...>) {
    using Rows = decltype(option_rows<Op::kOps>());
    AttentionOptions options;
    ((options.*std::tuple_element_t<option, Rows>::member =
          SchemaType<OptionType<std::tuple_element_t<option, Rows>>>::member(
              std::get<sizeof...(before) + option>(arguments))),
     ...);
    return {std::get<before>(arguments)..., std::move(options),
            SchemaType<std::remove_cvref_t<std::tuple_element_t<after, After>>>::member(
                std::get<sizeof...(before) + sizeof...(option) + after>(arguments))...};
  }
};

// Calls through the dispatcher: from the top, or from below the caller's own key.
template <class Op>
const auto& handle() {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow(Op::kName, "").template typed<typename Spread<Op>::Signature>();
  return op;
}
template <class Op>
typename Op::Result call(const typename Op::Args& args) {
  return std::apply([](const auto&... a) { return handle<Op>().call(a...); }, Spread<Op>::arguments(args));
}
template <class Op>
typename Op::Result redispatch(c10::DispatchKeySet keys, const typename Op::Args& args) {
  return std::apply([&](const auto&... a) { return handle<Op>().redispatch(keys, a...); }, Spread<Op>::arguments(args));
}

// The function to register for a kernel that takes an Args, or a DispatchKeySet and an Args.
template <class Op, auto kernel, class Signature>
struct Registered;
template <class Op, auto kernel, class Result, class... Argument>
struct Registered<Op, kernel, Result(Argument...)> {
  static Result call(Argument... arguments) { return kernel(Spread<Op>::gather(std::forward_as_tuple(arguments...))); }
  static Result call_with_keys(c10::DispatchKeySet keys, Argument... arguments) {
    return kernel(keys, Spread<Op>::gather(std::forward_as_tuple(arguments...)));
  }
};
template <class Op, auto kernel>
constexpr auto registered() {
  using Function = Registered<Op, kernel, typename Spread<Op>::Signature>;
  if constexpr (std::is_invocable_v<decltype(kernel), const typename Op::Args&>) {
    return &Function::call;
  } else {
    return &Function::call_with_keys;
  }
}

}  // namespace scaledot
