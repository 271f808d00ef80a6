#include "eval/match.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

namespace kvmosaic::eval {

using nlohmann::ordered_json;

namespace {

const Row* row_of(const std::vector<Row>& rows, const std::string& spec) {
    for (const Row& row : rows)
        if (row.spec != "floor" && row.canonical == spec) return &row;
    return nullptr;
}

// Bits at the context: of the pages that the row had, else as predicted.
double bits_of(const MatchedSetting& m, const Row* row, const Row& base) {
    const double seen = row ? summarize(*row, base).bits_context : 0;
    return std::isfinite(seen) && seen > 0 ? seen : m.setting.bits;
}

} // namespace

bool MatchedSetting::near() const { return std::fabs(residual()) <= kMatchWithin; }

MatchedSetting nearest_setting(const std::vector<SizedSetting>& sized, double budget) {
    constexpr double kEqual = 0.02;
    const auto off = [budget](const SizedSetting& s) { return std::fabs(s.bits - budget); };
    double least = off(sized.front());
    for (const SizedSetting& s : sized)
        least = std::min(least, off(s));
    return {*std::find_if(sized.begin(), sized.end(), [&](const SizedSetting& s) { return off(s) <= least + kEqual; }),
            budget};
}

std::vector<std::string> Matched::specs() const {
    std::vector<std::string> out;
    for (const MatchedSetting& m : settings)
        if (m.near() && std::find(out.begin(), out.end(), m.setting.spec) == out.end()) out.push_back(m.setting.spec);
    return out;
}

void add_specs(const std::vector<std::string>& more, std::vector<std::string>* specs) {
    std::vector<std::string> meant;
    for (const std::string& spec : *specs) {
        const auto method = open_method(spec);
        meant.push_back(method ? (*method)->spec() : spec);
    }
    for (const std::string& spec : more)
        if (std::find(meant.begin(), meant.end(), spec) == meant.end()) specs->push_back(spec);
}

Status validate(const MatchWish& wish) {
    const auto wrong = [](const std::string& text) { return Status(StatusCode::invalid_argument, text); };
    for (const double budget : wish.budgets)
        if (!(budget >= 0.5 && budget <= 32)) return wrong(fmt::format("--match-bits {}: 0.5 to 32", budget));
    for (size_t i = 0; i < wish.methods.size(); ++i) {
        if (const auto settings = settings_of(wish.methods[i]); !settings)
            return {settings.status().code(),
                    fmt::format("--method {}: {}", wish.methods[i], settings.status().message())};
        if (std::count(wish.methods.begin(), wish.methods.end(), wish.methods[i]) > 1)
            return wrong(fmt::format("--method {}: is given twice", wish.methods[i]));
    }
    if (wish.context != 0 && (wish.context < 1 || wish.context > int64_t(1) << 24))
        return wrong(fmt::format("--match-ctx {}: 1 to {}", wish.context, int64_t(1) << 24));
    return {};
}

Result<Matched> match_bits(const Model& model, const MatchWish& wish, int32_t threads, const Progress& progress) {
    if (Status bad = validate(wish); !bad) return bad;
    Matched out;
    const int64_t trained = model.trained_context();
    out.context = wish.context > 0 ? wish.context : trained > 0 ? std::min(kMatchContext, trained) : kMatchContext;
    ContextOptions options; // for the shape alone
    options.context = int32_t(std::min<int64_t>(out.context, 256)), options.ubatch = 16, options.threads = threads;
    const Result<Context> context = Context::make(model, options);
    if (!context) return context.status();
    std::vector<std::vector<SizedSetting>> sized;
    const std::vector<std::string> names = wish.methods.empty() ? free_methods() : wish.methods;
    for (size_t i = 0; i < names.size(); ++i) {
        std::vector<std::string> refused;
        const auto settings = settings_of(names[i]);
        if (!settings) return settings.status();
        sized.push_back(size_settings(context->cache()->shape(), *settings, {out.context, 1, threads}, &refused,
                                      [&](const std::string& what, double share) {
                                          if (progress) progress(what, (double(i) + share) / double(names.size()));
                                      }));
        if (sized.back().empty())
            return Status(StatusCode::unsupported, fmt::format("--method {}: {}", names[i], refused.front()));
    }
    for (const double budget : wish.budgets)
        for (const std::vector<SizedSetting>& settings : sized)
            out.settings.push_back(nearest_setting(settings, budget));
    return out;
}

std::string to_table(const Matched& matched, const std::vector<Row>& rows) {
    size_t wide = 24;
    for (const MatchedSetting& m : matched.settings)
        wide = std::max(wide, m.setting.spec.size());
    std::string out = fmt::format("settings nearest to a budget of true bits at {} tokens\n", matched.context);
    out += fmt::format("{:>6}  {:<{}}  {:>6} {:>6}  {:>9} {:>9}  {:>7}\n", "budget", "cache", wide, "bits", "off",
                       "KL mean", "+-", "top-1 %");
    for (const MatchedSetting& m : matched.settings) {
        const Row* row = row_of(rows, m.setting.spec);
        const double bits = bits_of(m, row, rows.front());
        out += fmt::format("{:>6.4g}  {:<{}}  {:>6.2f} {:>+6.2f}  ", m.budget, m.setting.spec, wide, bits,
                           bits - m.budget);
        if (!m.near()) {
            out += fmt::format("no setting of {} is nearer; not compared\n", m.setting.method);
            continue;
        }
        const RowSummary s = row ? summarize(*row, rows.front()) : RowSummary{};
        out += fmt::format("{:>9.5f} {:>9.5f}  {:>7.2f}\n", s.kl_mean, s.kl_error, 100 * s.top1);
    }
    return out;
}

ordered_json to_json(const Matched& matched, const std::vector<Row>& rows) {
    ordered_json out{{"context", matched.context}, {"within", kMatchWithin}, {"settings", ordered_json::array()}};
    for (const MatchedSetting& m : matched.settings) {
        const double bits = bits_of(m, row_of(rows, m.setting.spec), rows.front());
        out["settings"].push_back({{"budget", m.budget},
                                   {"method", m.setting.method},
                                   {"spec", m.setting.spec},
                                   {"true_bits", bits},
                                   {"residual", bits - m.budget},
                                   {"compared", m.near()}});
    }
    return out;
}

} // namespace kvmosaic::eval
