// An echo by gRPC, both ends: `echo_grpc server PORT`, or `echo_grpc client PORT CONNECTIONS`. Needs no .proto file.
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <iostream>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

using grpc::ByteBuffer;
using grpc::Status;

namespace {

constexpr size_t kStreamed = 500; // messages of a stream
constexpr size_t kStreamedSize = 4096;
constexpr size_t kUnarySizes[] = {0, 1, 100, 4096, 65'537, 1'000'000, 5'000'000};

void must(bool good, const std::string &what)
{
	if (good)
		return;
	std::cerr << what << std::endl;
	std::_Exit(1);
}

std::string payload(size_t size, uint64_t seed)
{
	std::mt19937_64 words(seed);
	std::string bytes;

	bytes.reserve(size + sizeof(uint64_t));
	while (bytes.size() < size) {
		uint64_t word = words();
		bytes.append(reinterpret_cast<const char *>(&word), sizeof(word));
	}
	bytes.resize(size);
	return bytes;
}

ByteBuffer wrapped(const std::string &bytes)
{
	grpc::Slice slice(bytes);
	return ByteBuffer(&slice, 1);
}

std::string unwrapped(const ByteBuffer &buffer)
{
	std::vector<grpc::Slice> slices;
	std::string bytes;

	must(buffer.Dump(&slices).ok(), "a message cannot be read");
	for (const grpc::Slice &slice : slices)
		bytes.append(reinterpret_cast<const char *>(slice.begin()), slice.size());
	return bytes;
}

// ---- server ----

class Echo final : public grpc::ServerGenericBidiReactor {
public:
	Echo() { StartRead(&message_); }
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
	void OnDone() override { delete this; }

private:
	ByteBuffer message_;
};

class Service final : public grpc::CallbackGenericService {
	grpc::ServerGenericBidiReactor *CreateReactor(grpc::GenericCallbackServerContext *) override { return new Echo; }
};

int serve(const std::string &address)
{
	Service service;
	grpc::ServerBuilder builder;

	builder.AddListeningPort(address, grpc::InsecureServerCredentials());
	builder.SetMaxReceiveMessageSize(-1);
	builder.RegisterCallbackGenericService(&service);
	std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
	must(server != nullptr, "cannot listen");
	server->Wait();
	return 0;
}

// ---- client ----

// gRPC 1.51 looks at connect()'s errno only after it has allocated memory, by which glibc may have set another: then a
// connection that is being made counts as failed (seen in a client that ran without sidestep). It is made again.
void wait_for_connection(grpc::ClientContext &context) { context.set_wait_for_ready(true); }

// Sends without waiting for answers, which come at the same time.
class Stream final : public grpc::ClientBidiReactor<ByteBuffer, ByteBuffer> {
public:
	Stream(grpc::GenericStub &stub, uint64_t seed) : seed_(seed)
	{
		wait_for_connection(context_);
		stub.PrepareBidiStreamingCall(&context_, "/Echo/Stream", {}, this);
		send();
		StartRead(&answer_);
		StartCall();
	}
	void OnWriteDone(bool ok) override
	{
		must(ok, "a stream ended while it was written");
		if (sent_ < kStreamed)
			send();
		else
			StartWritesDone();
	}
	void OnReadDone(bool ok) override
	{
		if (!ok)
			return;
		must(unwrapped(answer_) == payload(kStreamedSize, seed_ + got_), "a stream's message came back changed");
		got_++;
		StartRead(&answer_);
	}
	void OnDone(const Status &status) override { done_.set_value(status); }
	void wait()
	{
		Status status = done_.get_future().get();
		must(status.ok(), "a stream failed: " + status.error_message());
		must(got_ == kStreamed, "a stream lost messages");
	}

private:
	void send()
	{
		message_ = wrapped(payload(kStreamedSize, seed_ + sent_++));
		StartWrite(&message_);
	}

	grpc::ClientContext context_;
	ByteBuffer message_, answer_;
	uint64_t seed_;
	size_t sent_ = 0, got_ = 0;
	std::promise<Status> done_;
};

void unary(grpc::GenericStub &stub, size_t size, uint64_t seed)
{
	grpc::ClientContext context;
	std::string sent = payload(size, seed);
	ByteBuffer message = wrapped(sent), answer;
	std::promise<Status> done;

	wait_for_connection(context);
	stub.UnaryCall(&context, "/Echo/Unary", {}, &message, &answer, [&](Status status) { done.set_value(status); });
	Status status = done.get_future().get();
	must(status.ok(), "a call failed: " + status.error_message());
	must(unwrapped(answer) == sent, "a call's answer is another");
}

// One connection of its own: else gRPC gives all channels to an address the same.
std::unique_ptr<grpc::GenericStub> connect(const std::string &address)
{
	grpc::ChannelArguments arguments;

	arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
	arguments.SetMaxReceiveMessageSize(-1);
	return std::make_unique<grpc::GenericStub>(
		grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments));
}

int ask(const std::string &address, size_t connections)
{
	std::vector<std::unique_ptr<grpc::GenericStub>> stubs;
	std::string line;

	for (size_t i = 0; i < connections; i++)
		stubs.push_back(connect(address));
	auto exchange = [&stubs](size_t number) {
		for (size_t size : kUnarySizes)
			unary(*stubs[number], size, number);
		Stream(*stubs[number], number << 32).wait();
	};
	auto exchange_all = [&exchange, connections] {
		std::vector<std::thread> threads;
		for (size_t i = 0; i < connections; i++)
			threads.emplace_back(exchange, i);
		for (std::thread &thread : threads)
			thread.join();
	};
	exchange_all();
	std::cout << "all came back" << std::endl;
	while (std::getline(std::cin, line)) {
		if (line == "again") {
			exchange_all();
			std::cout << "came back again" << std::endl;
			continue;
		}
		for (const auto &stub : stubs)
			unary(*stub, 1000, 0);
		std::cout << "nudged" << std::endl;
	}
	return 0;
}

} // namespace

int main(int argc, char **argv)
{
	must(argc >= 3, "usage: echo_grpc server PORT | client PORT CONNECTIONS");
	std::string address = std::string("127.0.0.1:") + argv[2];
	return argc == 3 ? serve(address) : ask(address, std::stoul(argv[3]));
}
