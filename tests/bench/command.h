// The command line.
#pragma once

#include <getopt.h>

#include <cstdio>
#include <fstream>
#include <functional>
#include <sstream>
#include <type_traits>

#include "measure.h"
#include "sets.h"

namespace scaledot::bench {

struct Command {
  std::vector<std::string> kernels = {""};  // "": what select() chooses
  std::vector<Item> items;
  std::vector<DType> dtypes = {DType::float32};
  std::vector<Pass> passes = {Pass::forward};
  int threads = 1;
  int schedule = 0;  // cores; 0: time instead
  Effort effort;
  std::string json;
};

inline std::string usage() {
  std::string text = R"(scaledot_bench: how near the CPU kernels come to the limits of the machine, without torch.

  --shape LIST     BxHxLxD: 1x8x1024x64, 1x32:8x1:4096x128 (query:KV heads and lengths), 1x8x512x64:96
  --set LIST       named sets of shapes with their own options (below)
  --dtype LIST     float32 (default), float64, bfloat16, float16
  --pass LIST      forward (default), backward
  --kernel LIST    kernels of the table by name; default: the one that would be chosen
  --causal, --dropout P, --softcap C, --mask bool|padding|float|grad, --weights, --keep,
  --blhd,
  --cache float8_e4m3fn|float8_e5m2|int8
                   options of the shapes given by --shape; --keep: the forward keeps the weights for the backward;
                   --cache: quantised keys and values
  --threads N      default 1; the limits are measured on as many
  --seconds S      how long a case is timed at least, default 0.5
  --schedule N     time every task of the cases and simulate a run on N cores, in place of timing
  --json FILE      every reading

Columns:
  time          the median time of a call
  GFLOP/s       operations of the matrix products per second (2 products forward, 5 backward; is_causal's masked scores
                are not counted)
  of the limit  the share of the peak that the kernel's instructions reach in a loop without memory, measured in turn
                with the kernel; for decoding shapes, the share of the bandwidth of summing a large buffer
  plain         the time relative to the same case without its options, timed in turn
Every kernel is checked against the reference kernel before it is timed. SCALEDOT_CPU_CAPABILITY=avx2 excludes AVX-512.

sets:
)";
  for (const Set& set : sets())
    text += "  " + std::string(set.name) + std::string(12 - strlen(set.name), ' ') + set.about + "\n";
  text += "kernels:\n ";
  const KernelTable table = cpu_kernels();
  for (int k = 0; k < table.count; ++k) text += std::string(" ") + table.kernels[k].name;
  return text + "\n";
}

inline std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) parts.push_back(part);
  return parts;
}

// The entry of a table with this name. Throws if there is none.
template <class Names, class NameOf>
auto find(const Names& table, const std::string& name, const char* what, const NameOf& name_of) {
  std::string known;
  for (const auto& entry : table) {
    if (name == name_of(entry)) return entry;
    known += std::string(known.empty() ? "" : ", ") + name_of(entry);
  }
  throw std::invalid_argument("'" + name + "' is no " + what + "; known are " + known);
}

template <class T>
T number(const char* option, const std::string& text, T least, T below) {
  std::istringstream stream(text);
  T value;
  if (!(stream >> value) || !stream.eof() || !(value >= least && value < below)) {
    std::ostringstream message;
    message << "--" << option << ": got '" << text << "'; needs " << (std::is_integral_v<T> ? "an integer" : "a number")
            << " from " << least << " to below " << below;
    throw std::invalid_argument(message.str());
  }
  return value;
}

// An option of the command line. `take` is called with its value, or "" if it has none.
struct Flag {
  const char* name;
  int argument;  // no_argument or required_argument
  std::function<void(const std::string&)> take;
};

// Calls the options that are given, in order.
inline void read_flags(int argc, char** argv, const std::vector<Flag>& flags) {
  std::vector<option> known;
  for (const Flag& f : flags) known.push_back({f.name, f.argument, nullptr, 0});
  known.push_back({nullptr, 0, nullptr, 0});
  opterr = 0;
  for (int index, found; (found = getopt_long(argc, argv, "", known.data(), &index)) != -1;) {
    if (found != 0)
      throw std::invalid_argument(std::string("'") + argv[optind - 1] +
                                  "' is no option, or lacks its value; see --help");
    flags[size_t(index)].take(optarg ? optarg : "");
  }
  if (optind < argc)
    throw std::invalid_argument(std::string("'") + argv[optind] + "' belongs to no option; see --help");
}

// Throws std::invalid_argument, with a message, for a wrong option.
inline Command parse(int argc, char** argv) {
  constexpr int kNone = no_argument, kOne = required_argument, kMostThreads = 4096;
  Command command;
  Options options;
  std::vector<std::string> shapes;
  const auto itself = [](const char* name) { return name; };
  const auto set = [&](const std::string& names) {
    for (const std::string& name : split(names)) {
      const Set chosen = find(sets(), name, "set", [](const Set& s) { return s.name; });
      command.items.insert(command.items.end(), chosen.items.begin(), chosen.items.end());
    }
  };
  const auto dtype = [&](const std::string& names) {
    command.dtypes.clear();
    for (const std::string& name : split(names))
      command.dtypes.push_back(find(kDTypes, name, "dtype", [](NamedDType d) { return d.name; }).dtype);
  };
  const auto pass = [&](const std::string& names) {
    command.passes.clear();
    for (const std::string& name : split(names))
      command.passes.push_back(find(kPassNames, name, "pass", itself) == kPassNames[0] ? Pass::forward
                                                                                       : Pass::backward);
  };
  const auto kernel = [&](const std::string& names) {
    command.kernels = split(names);
    for (const std::string& name : command.kernels) kernel_by_name(name);
  };
  const auto mask = [&](const std::string& name) {
    const char* known = find(kMaskNames, name, "mask", itself);
    for (int k = 0; k < int(std::size(kMaskNames)); ++k)
      if (known == kMaskNames[k]) options.mask = Mask(k);
  };
  const auto cache = [&](const std::string& name) {
    options.cache = find(kCaches, name, "dtype of quantised keys", [](NamedDType d) { return d.name; }).dtype;
  };
  const auto json = [&](const std::string& file) {
    // Fail before an hour of measuring.
    if (!std::ofstream(file, std::ios::app)) throw std::invalid_argument("--json: cannot write '" + file + "'");
    command.json = file;
  };
  const auto count = [](const char* option, int& value) {
    return [option, &value](const std::string& text) { value = number(option, text, 1, kMostThreads); };
  };
  const auto help = [](const std::string&) {
    std::fputs(usage().c_str(), stdout);
    std::exit(0);
  };
  read_flags(argc, argv,
             {{"shape", kOne, [&](const std::string& text) { shapes = split(text); }},
              {"set", kOne, set},
              {"dtype", kOne, dtype},
              {"pass", kOne, pass},
              {"kernel", kOne, kernel},
              {"causal", kNone, [&](const std::string&) { options.causal = true; }},
              {"dropout", kOne, [&](const std::string& p) { options.dropout_p = number("dropout", p, 0.0, 1.0); }},
              {"softcap", kOne, [&](const std::string& c) { options.softcap = number("softcap", c, 0.0, 1e6); }},
              {"mask", kOne, mask},
              {"cache", kOne, cache},
              {"weights", kNone, [&](const std::string&) { options.weights = true; }},
              {"keep", kNone, [&](const std::string&) { options.keep = true; }},
              {"blhd", kNone, [&](const std::string&) { options.blhd = true; }},
              {"threads", kOne, count("threads", command.threads)},
              {"seconds", kOne, [&](const std::string& s) { command.effort.seconds = number("seconds", s, 0.0, 1e6); }},
              {"schedule", kOne, count("schedule", command.schedule)},
              {"json", kOne, json},
              {"help", kNone, help}});

  for (const std::string& text : shapes) command.items.push_back({text, options});
  for (const Item& item : command.items) {
    const Shape s = parse_shape(item.shape);
    if (item.options.causal && s.query_length != s.key_length)
      throw std::invalid_argument("shape '" + item.shape + "': causal needs as many queries as keys");
  }
  const auto asks_for = [](const auto& list, auto wanted) {
    return std::find(list.begin(), list.end(), wanted) != list.end();
  };
  if (options.cache != DType::none &&
      (asks_for(command.passes, Pass::backward) || asks_for(command.dtypes, DType::float64)))
    throw std::invalid_argument("--cache: quantised keys and values have no backward, and no float64");
  if (shapes.empty() && (!options.plain() || options.blhd))
    throw std::invalid_argument("the sets have their own options; give a --shape");
  if (command.schedule > 0 && (command.threads > 1 || !command.json.empty()))
    throw std::invalid_argument("--schedule records on one thread and writes no file: leave --threads and --json out");
  if (command.items.empty()) throw std::invalid_argument("nothing to do: give --shape or --set; see --help");
  return command;
}

}  // namespace scaledot::bench
