// Unary calls by gRPC's C++, one after the other: an echo of -s bytes. Speaks with who runs it as the C programs do
// (c/bench.h). The answer to each call has its number at both ends, and during the warm-up every byte is compared.
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <future>
#include <iostream>
#include <memory>
#include <random>
#include <string>
#include <vector>

using grpc::ByteBuffer;
using grpc::Status;
using Clock = std::chrono::steady_clock;

namespace
{

struct Options {
	bool server = false;
	size_t size = 1'000'000;
	int port = 0;
	double warmup_s = 0.3, measure_s = 1;
};

void must(bool good, const std::string &what)
{
	if (good)
		return;
	std::cerr << what << std::endl;
	std::_Exit(1);
}

class Echo final : public grpc::ServerGenericBidiReactor
{
  public:
	Echo()
	{
		StartRead(&message_);
	}
	void OnReadDone(bool ok) override
	{
		if (ok)
			StartWrite(&message_);
		else
			Finish(Status::OK);
	}
	void OnWriteDone(bool ok) override
	{
		if (ok)
			StartRead(&message_);
		else
			Finish(Status::CANCELLED);
	}
	void OnDone() override
	{
		delete this;
	}

  private:
	ByteBuffer message_;
};

class Service final : public grpc::CallbackGenericService
{
	grpc::ServerGenericBidiReactor *CreateReactor(grpc::GenericCallbackServerContext *) override
	{
		return new Echo;
	}
};

void serve()
{
	Service service;
	grpc::ServerBuilder builder;
	int port = 0;

	builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
	builder.SetMaxReceiveMessageSize(-1);
	builder.RegisterCallbackGenericService(&service);
	std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
	must(server != nullptr, "cannot listen");
	std::cout << "listening " << port << std::endl;
	server->Wait();
}

// What was sent: random bytes, and the number of the call at both ends.
class Message
{
  public:
	explicit Message(size_t size) : bytes_(size, '\0')
	{
		std::mt19937_64 random(1);
		std::generate(bytes_.begin(), bytes_.end(), [&random] { return static_cast<char>(random()); });
	}
	ByteBuffer numbered(uint64_t number)
	{
		std::memcpy(&bytes_.front(), &number, sizeof(number));
		std::memcpy(&bytes_.back() - sizeof(number) + 1, &number, sizeof(number));
		grpc::Slice slice(bytes_.data(), bytes_.size(), grpc::Slice::STATIC_SLICE);
		return ByteBuffer(&slice, 1);
	}
	bool is(const ByteBuffer &answer, bool whole) const
	{
		std::vector<grpc::Slice> slices;
		size_t at = 0;

		if (answer.Length() != bytes_.size() || !answer.Dump(&slices).ok())
			return false;
		for (const grpc::Slice &slice : slices) {
			size_t looked = whole ? slice.size() : std::min(slice.size(), sizeof(uint64_t));

			if (std::memcmp(slice.begin(), bytes_.data() + at, looked) ||
			    std::memcmp(slice.end() - looked, bytes_.data() + at + slice.size() - looked, looked))
				return false;
			at += slice.size();
		}
		return true;
	}

  private:
	std::string bytes_;
};

void ask(const Options &options)
{
	grpc::ChannelArguments arguments;
	Message message(options.size);
	std::vector<double> times;
	std::string line;

	arguments.SetMaxReceiveMessageSize(-1);
	grpc::GenericStub stub(grpc::CreateCustomChannel("127.0.0.1:" + std::to_string(options.port),
	                                                 grpc::InsecureChannelCredentials(), arguments));
	Clock::time_point now = Clock::now(), start = now + std::chrono::nanoseconds(int64_t(options.warmup_s * 1e9));
	Clock::time_point end = start + std::chrono::nanoseconds(int64_t(options.measure_s * 1e9));
	for (uint64_t number = 0; now < end; number++) {
		Clock::time_point sent = now;
		grpc::ClientContext context;
		ByteBuffer request = message.numbered(number), answer;
		std::promise<Status> done;

		context.set_wait_for_ready(true);
		stub.UnaryCall(&context, "/Echo/Unary", {}, &request, &answer,
		               [&done](Status status) { done.set_value(status); });
		Status status = done.get_future().get();
		must(status.ok(), "a call failed: " + status.error_message());
		must(message.is(answer, sent < start), "the answer is not what was sent");
		now = Clock::now();
		if (sent >= start)
			times.push_back(std::chrono::duration<double>(now - sent).count());
	}
	std::cout << "holding" << std::endl;
	while (std::getline(std::cin, line))
		continue;
	must(!times.empty(), "nothing was measured; give it more time (-t)");
	std::sort(times.begin(), times.end());
	double seconds = 0;
	for (double each : times)
		seconds += each;
	auto at = [&times](double share) { return int64_t(1e9 * times[size_t(share * double(times.size() - 1))]); };
	std::cout << "{\"rate\": " << double(times.size()) / seconds << ", \"p50_ns\": " << at(0.5)
			  << ", \"p99_ns\": " << at(0.99) << ", \"p999_ns\": " << at(0.999) << "}" << std::endl;
}

Options read(int argc, char **argv)
{
	Options options;

	must(argc >= 2, "usage: grpc_unary server|client [-s SIZE] [-p PORT] [-w WARMUP_S] [-t SECONDS] [-H]");
	options.server = !std::strcmp(argv[1], "server");
	for (int i = 2; i < argc; i++) {
		std::string option = argv[i];

		if (option == "-H")
			continue;
		must(i + 1 < argc, option + " takes a value");
		double value = std::atof(argv[++i]);
		if (option == "-s")
			options.size = size_t(value);
		else if (option == "-p")
			options.port = int(value);
		else if (option == "-w")
			options.warmup_s = value;
		else if (option == "-t")
			options.measure_s = value;
		else
			must(false, "unknown option " + option);
	}
	must(options.size >= 16, "-s is at least 16: a message has its number at both ends");
	return options;
}

} // namespace

int main(int argc, char **argv)
{
	Options options = read(argc, argv);

	if (options.server)
		serve();
	else
		ask(options);
	return 0;
}
