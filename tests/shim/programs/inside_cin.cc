// Lines by the C++ library's standard input: through the C library's stream, and past it.
#include <cstring>
#include <iostream>
#include <string>

static bool next(char *line)
{
	std::string text;

	if (!std::getline(std::cin, text))
		return false;
	std::strcpy(line, (text + "\n").c_str());
	return true;
}

extern "C" bool cin(char *line)
{
	return next(line);
}

extern "C" bool cin_alone(char *line)
{
	static const bool alone = (std::ios::sync_with_stdio(false), true);

	return alone && next(line);
}
