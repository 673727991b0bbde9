// The command line.
#pragma once

#include <getopt.h>

#include <cstdio>
#include <sstream>

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

  --shape LIST     BxHxLxD: 1x8x1024x64, 1x32:8x1:4096x128 (query:key heads and lengths), 1x8x512x64:96
  --set LIST       named sets of shapes with their own options (below)
  --dtype LIST     float32 (default), float64, bfloat16, float16
  --pass LIST      forward (default), backward
  --kernel LIST    kernels of the table by name; default: the one that would be chosen
  --causal, --dropout P, --mask bool|padding|float|grad, --weights, --blhd    options of the shapes given by --shape
  --threads N      default 1; the limits are measured on as many
  --seconds S      how long a case is timed at least, default 0.5
  --schedule N     time every task of the cases and simulate a run on N cores, in place of timing
  --json FILE      every reading

Columns: the median time of a call; the operations of the matrix products (2 forward, 5 backward; what is_causal hides is not
counted) per second; the share of the peak that the kernel's own instructions reach in a loop without memory, measured between
the readings of the kernel; "plain": the time over that of the same case without its options, timed in turn. Decoding shapes:
keys and values read per second, and the share of the bandwidth of summing a large buffer.
Every kernel is checked against the reference kernel before it is timed. SCALEDOT_CPU_CAPABILITY=avx2 leaves AVX-512 out.

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

// The entry of a table of names; throws if there is none.
template <class Names, class NameOf>
auto find(const Names& table, const std::string& name, const char* what, const NameOf& name_of) {
  std::string known;
  for (const auto& entry : table) {
    if (name == name_of(entry)) return entry;
    known += std::string(known.empty() ? "" : ", ") + name_of(entry);
  }
  throw std::invalid_argument("'" + name + "' is no " + what + "; known are " + known);
}

inline double number(const char* option, const char* text, double least, double below) {
  char* end;
  const double value = std::strtod(text, &end);
  if (*text == '\0' || *end != '\0' || !(value >= least && value < below)) {
    std::ostringstream message;
    message << "--" << option << ": got '" << text << "'; needs a number from " << least << " to below " << below;
    throw std::invalid_argument(message.str());
  }
  return value;
}

// Throws std::invalid_argument, with a sentence, for a wrong option.
inline Command parse(int argc, char** argv) {
  enum Option {
    shape,
    set,
    dtype,
    pass,
    kernel,
    causal,
    dropout,
    mask,
    weights,
    blhd,
    threads,
    seconds,
    schedule,
    json,
    help
  };
  constexpr int kNone = no_argument, kOne = required_argument;
  constexpr int kMostThreads = 4096;
  static const option known[] = {{"shape", kOne, nullptr, shape},      {"set", kOne, nullptr, set},
                                 {"dtype", kOne, nullptr, dtype},      {"pass", kOne, nullptr, pass},
                                 {"kernel", kOne, nullptr, kernel},    {"causal", kNone, nullptr, causal},
                                 {"dropout", kOne, nullptr, dropout},  {"mask", kOne, nullptr, mask},
                                 {"weights", kNone, nullptr, weights}, {"blhd", kNone, nullptr, blhd},
                                 {"threads", kOne, nullptr, threads},  {"seconds", kOne, nullptr, seconds},
                                 {"json", kOne, nullptr, json},        {"schedule", kOne, nullptr, schedule},
                                 {"help", kNone, nullptr, help},       {nullptr, 0, nullptr, 0}};
  Command command;
  Options options;
  std::vector<std::string> shapes;
  const auto c_string = [](const char* name) { return name; };
  opterr = 0;
  for (int found; (found = getopt_long(argc, argv, "", known, nullptr)) != -1;) {
    switch (found) {
      case shape: shapes = split(optarg); break;
      case set:
        for (const std::string& name : split(optarg)) {
          const Set chosen = find(sets(), name, "set", [](const Set& s) { return s.name; });
          command.items.insert(command.items.end(), chosen.items.begin(), chosen.items.end());
        }
        break;
      case dtype:
        command.dtypes.clear();
        for (const std::string& name : split(optarg))
          command.dtypes.push_back(find(kDTypes, name, "dtype", [](NamedDType d) { return d.name; }).dtype);
        break;
      case pass:
        command.passes.clear();
        for (const std::string& name : split(optarg))
          command.passes.push_back(find(kPassNames, name, "pass", c_string) == kPassNames[0] ? Pass::forward
                                                                                             : Pass::backward);
        break;
      case kernel:
        command.kernels = split(optarg);
        for (const std::string& name : command.kernels) kernel_by_name(name);
        break;
      case causal: options.causal = true; break;
      case dropout: options.dropout_p = number("dropout", optarg, 0, 1); break;
      case mask: {
        const char* name = find(kMaskNames, optarg, "mask", c_string);
        for (int k = 0; k < int(std::size(kMaskNames)); ++k)
          if (name == kMaskNames[k]) options.mask = Mask(k);
        break;
      }
      case weights: options.weights = true; break;
      case blhd: options.blhd = true; break;
      case threads: command.threads = int(number("threads", optarg, 1, kMostThreads)); break;
      case seconds: command.effort.seconds = number("seconds", optarg, 0, 1e6); break;
      case schedule: command.schedule = int(number("schedule", optarg, 1, kMostThreads)); break;
      case json: command.json = optarg; break;
      case help: std::fputs(usage().c_str(), stdout); std::exit(0);
      default:
        throw std::invalid_argument(std::string("'") + argv[optind - 1] +
                                    "' is no option, or lacks its value; see --help");
    }
  }
  if (optind < argc)
    throw std::invalid_argument(std::string("'") + argv[optind] + "' belongs to no option; see --help");
  for (const std::string& text : shapes) command.items.push_back({text, options});
  for (const Item& item : command.items) {
    const Shape s = parse_shape(item.shape);
    if (item.options.causal && s.query_length != s.key_length)
      throw std::invalid_argument("shape '" + item.shape + "': causal needs as many queries as keys");
  }
  if (shapes.empty() && (!options.plain() || options.blhd))
    throw std::invalid_argument("the sets have options of their own; give a --shape");
  if (command.schedule > 0 && (command.threads > 1 || !command.json.empty()))
    throw std::invalid_argument("--schedule records on one thread and writes no file: leave --threads and --json out");
  if (command.items.empty()) throw std::invalid_argument("nothing to do: give --shape or --set; see --help");
  return command;
}

}  // namespace scaledot::bench
