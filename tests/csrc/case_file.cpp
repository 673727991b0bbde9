#include "case_file.h"

#include <algorithm>
#include <fstream>
#include <functional>
#include <map>
#include <sstream>
#include <stdexcept>

namespace scaledot::testing {
namespace {

using Text = const std::string&;

std::vector<std::string> split(Text text) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) parts.push_back(part);
  return parts;
}

std::vector<int64_t> integers(Text text) {
  std::vector<int64_t> result;
  for (Text part : split(text)) result.push_back(std::stoll(part));
  return result;
}

// In the letters of a shape, 1 stands for a dimension of stride 0.
Broadcast broadcast(Text letters) {
  Broadcast result;
  bool* const dims[] = {&result.batch, &result.head, &result.row, &result.col};
  for (size_t k = 0; k < letters.size(); ++k) *dims[k] = letters[k] == '1';
  return result;
}

// The value that belongs to a word.
template <class T>
T one_of(Text word, const std::map<std::string, T>& values) {
  const auto found = values.find(word);
  if (found == values.end()) throw std::invalid_argument("cases.txt: unknown word " + word);
  return found->second;
}

DType dtype(Text name) {
  return one_of<DType>(name, {{"float32", DType::float32},
                              {"float64", DType::float64},
                              {"bfloat16", DType::bfloat16},
                              {"float16", DType::float16}});
}

// Flags whose names are in a list; the others become false.
void set_named(Text list, const std::map<std::string, bool*>& flags) {
  for (const auto& [name, flag] : flags) *flag = false;
  for (Text name : split(list)) *one_of(name, flags) = true;
}

void set_window(Case& c, Text text) {  // a side without a number stays as it is
  const size_t comma = text.find(',');
  if (comma > 0) c.window_left = std::stoll(text.substr(0, comma));
  if (comma + 1 < text.size()) c.window_right = std::stoll(text.substr(comma + 1));
}

using Setter = std::function<void(Case&, Text)>;
Setter flag(bool Case::*field) {
  return [field](Case& c, Text) { c.*field = true; };
}
Setter integer(int64_t Case::*field) {
  return [field](Case& c, Text text) { c.*field = std::stoll(text); };
}
Setter number(double Case::*field) {
  return [field](Case& c, Text text) { c.*field = std::strtod(text.c_str(), nullptr); };  // of a subnormal, stod throws
}

const std::map<std::string, Setter>& setters() {
  static const std::map<std::string, Setter> map = {
      {"batch", [](Case& c, Text text) { c.batch = integers(text); }},
      {"heads", [](Case& c, Text text) { c.heads = c.kv_heads = std::stoll(text); }},
      {"kv_heads", integer(&Case::kv_heads)},
      {"query_length", integer(&Case::query_length)},
      {"key_length", integer(&Case::key_length)},
      {"head_dim", [](Case& c, Text text) { c.head_dim = c.value_dim = std::stoll(text); }},
      {"value_dim", integer(&Case::value_dim)},
      {"dtype", [](Case& c, Text text) { c.dtype = dtype(text); }},
      {"causal", flag(&Case::causal)},
      {"lower_right", flag(&Case::lower_right)},
      {"window", set_window},
      {"mask",
       [](Case& c, Text text) {
         c.mask = one_of<MaskKind>(
             text, {{"bool", MaskKind::boolean}, {"float", MaskKind::additive}, {"inf", MaskKind::additive_with_inf}});
       }},
      {"mask_shape", [](Case& c, Text text) { c.mask_broadcast = broadcast(text); }},
      {"mask_dtype", [](Case& c, Text text) { c.mask_dtype = dtype(text); }},
      {"mask_offset", number(&Case::mask_offset)},
      {"mask_low", number(&Case::mask_low)},
      {"empty_rows", flag(&Case::empty_rows)},
      {"masked_score", number(&Case::masked_score)},
      {"alibi",
       [](Case& c, Text text) {
         c.alibi = one_of<AlibiKind>(text, {{"H", AlibiKind::heads}, {"BH", AlibiKind::batch_heads}});
       }},
      {"relative",
       [](Case& c, Text text) {
         c.relative = one_of<RelativeKind>(
             text, {{"1", RelativeKind::shared}, {"H", RelativeKind::heads}, {"BH", RelativeKind::batch_heads}});
       }},
      {"relative_range",
       [](Case& c, Text text) {
         c.relative_range = {integers(text)[0], integers(text)[1]};
       }},
      {"relative_low", number(&Case::relative_low)},
      {"blocks", [](Case& c, Text text) { c.block_broadcast = broadcast(text); }},
      {"block_size", [](Case& c, Text text) { c.block_rows = integers(text)[0], c.block_keys = integers(text)[1]; }},
      {"scale", number(&Case::scale)},
      {"softcap", number(&Case::softcap)},
      {"dropout_p", number(&Case::dropout_p)},
      {"dropout_seeds", integer(&Case::dropout_seeds)},
      {"part",
       [](Case& c, Text text) {
         const std::vector<int64_t> n = integers(text);
         c.part = {true, n[0], n[1], n[2], n[3], n[4]};
       }},
      {"return_weights", flag(&Case::return_weights)},
      {"grads",
       [](Case& c, Text text) {
         set_named(text, {{"output", &c.grad_output}, {"lse", &c.grad_lse}, {"weights", &c.grad_weights}});
       }},
      {"wants",
       [](Case& c, Text text) {
         set_named(text, {{"query", &c.wants_query}, {"key", &c.wants_key}, {"value", &c.wants_value}});
       }},
      {"layout",
       [](Case& c, Text text) {
         c.order = one_of<MemoryOrder>(
             text,
             {{"blhd", MemoryOrder::blhd}, {"inner2", MemoryOrder::inner2}, {"transposed", MemoryOrder::transposed}});
       }},
      {"expanded_keys",
       [](Case& c, Text text) {
         *one_of<bool*>(text, {{"batch", &c.key_broadcast.batch}, {"heads", &c.key_broadcast.head}}) = true;
       }},
      {"scales",
       [](Case& c, Text text) {
         c.scales.clear();
         for (Text part : split(text)) c.scales.push_back(part == "nan" ? kNaN : std::stod(part));
       }},
      {"spread", number(&Case::spread)},
      {"nan_in_masked", flag(&Case::nan_in_masked)},
      {"nan_in_live_query", flag(&Case::nan_in_live_query)},
      {"nan_in_live_key", flag(&Case::nan_in_live_key)},
      {"nan_in_live_value", flag(&Case::nan_in_live_value)},
      {"inf_in_live_key", flag(&Case::inf_in_live_key)},
      {"@c++", [](Case&, Text) {}},
  };
  return map;
}

using Sections = std::map<std::string, std::vector<CaseLine>>;

Sections read(const char* path) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error(std::string("cannot read ") + path);
  Sections sections;
  std::vector<CaseLine>* section = nullptr;
  for (std::string text; std::getline(file, text);) {
    std::istringstream words(text.substr(0, text.find('#')));
    std::string word;
    if (text[0] == '[') {
      section = &sections[text.substr(1, text.find(']') - 1)];
      continue;
    }
    if (text[0] != ' ' && words >> word) section->push_back({word, {}});
    while (words >> word) {
      const size_t equals = word.find('=');
      section->back().options.push_back({word.substr(0, equals), equals == word.npos ? "" : word.substr(equals + 1)});
    }
  }
  const auto is_of_python = [](const CaseLine& line) {
    return std::any_of(line.options.begin(), line.options.end(), [](const auto& o) { return o.first == "@python"; });
  };
  for (auto& [name, lines] : sections) std::erase_if(lines, is_of_python);
  return sections;
}

}  // namespace

void CaseLine::apply(Case& c) const {
  for (const auto& [option, text] : options) {
    const auto setter = setters().find(option);
    if (setter == setters().end()) throw std::invalid_argument("cases.txt: " + name + ": unknown option " + option);
    setter->second(c, text);
  }
}

const std::vector<CaseLine>& case_lines(const std::string& section) {
  static const Sections sections = read(SCALEDOT_CASES);
  return sections.at(section);
}

}  // namespace scaledot::testing
