// Echo with Node's streams.
"use strict";
const fs = require("fs");
const net = require("net");
const HOST = "127.0.0.1";
const [what, port, connections, place] = process.argv.slice(2);

if (what === "server") {
	const server = net.createServer({ allowHalfOpen: true }, (socket) => socket.pipe(socket));
	server.listen({ host: HOST, port: 0, backlog: 128 }, () => console.log(server.address().port));
} else {
	for (let number = 0; number < Number(connections); number++) {
		const socket = net.connect({ host: HOST, port: Number(port), allowHalfOpen: true });
		const got = [];
		socket.on("data", (data) => got.push(data));
		socket.on("end", () => fs.writeFileSync(`${place}/${number}.out`, Buffer.concat(got)));
		socket.end(fs.readFileSync(`${place}/${number}.in`));
	}
}
