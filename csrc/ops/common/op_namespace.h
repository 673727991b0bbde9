// The namespace of the ops in torch's dispatcher. It is "scaledot", unless a build is to be loaded together with
// another one: the setting SCALEDOT_OP_NAMESPACE of CMake. These are macros because torch's registration macros take a
// bare name.
#pragma once

#ifndef SCALEDOT_OP_NAMESPACE
#define SCALEDOT_OP_NAMESPACE scaledot
#endif

// torch's macros in this namespace. They do not expand a macro, so it is expanded here.
#define SCALEDOT_LIBRARY(module) SCALEDOT_EXPAND(TORCH_LIBRARY, SCALEDOT_OP_NAMESPACE, module)
#define SCALEDOT_LIBRARY_FRAGMENT(module) SCALEDOT_EXPAND(TORCH_LIBRARY_FRAGMENT, SCALEDOT_OP_NAMESPACE, module)
#define SCALEDOT_LIBRARY_IMPL(key, module) SCALEDOT_EXPAND(TORCH_LIBRARY_IMPL, SCALEDOT_OP_NAMESPACE, key, module)
#define SCALEDOT_EXPAND(macro, name, ...) macro(name, __VA_ARGS__)

// The dispatcher's name of an op: SCALEDOT_OP("sdpa") is "scaledot::sdpa".
#define SCALEDOT_OP(op) SCALEDOT_EXPAND(SCALEDOT_OP_TEXT, SCALEDOT_OP_NAMESPACE, op)
#define SCALEDOT_OP_TEXT(name, op) #name "::" op
